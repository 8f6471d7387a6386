"""What the protocol's verbs do, whichever transport asks. Answers are plain values in JSON's form."""

from typing import Any

from stageloom.edge_agent.serving.failures import FailureKind, InferenceFailure, unsupported
from stageloom.edge_agent.serving.inference import InferenceService
from stageloom.edge_agent.serving.models import listed_names, model_config, model_metadata, versions_of
from stageloom.edge_agent.serving.regions import RegionTable
from stageloom.shared.errors import NotFoundError, UnavailableError


class Verbs:
    """The verbs beside inference itself."""

    def __init__(self, service: InferenceService, regions: RegionTable) -> None:
        self.service = service
        self.regions = regions

    async def model_ready(self, name: str, version: str) -> bool:
        """Whether a task for this model would be taken. A model that is not there is not ready."""
        await self.service.refresh()
        try:
            await self.service.model(name, version)
        except (NotFoundError, UnavailableError):
            return False
        return await self.service.ready()

    async def metadata(self, name: str, version: str) -> dict[str, Any]:
        await self.service.refresh()
        return model_metadata(await self.service.model(name, version))

    async def config(self, name: str, version: str) -> dict[str, Any]:
        await self.service.refresh()
        return model_config(await self.service.model(name, version), self.service.most_rows)

    async def statistics(self, name: str, version: str) -> dict[str, Any]:
        """Of one model, or of all for an empty name; each version by itself."""
        models = await self.service.refresh()
        asked = {name: await self.service.models(name, version)} if name else models
        names = asked if name else listed_names(models)
        found = [(one, number) for one in names for number in versions_of(asked[one])]
        return {"model_stats": [self.service.statistics.of(*one) for one in found]}

    async def index(self, *, ready: bool) -> list[dict[str, Any]]:
        """The models of the active plan: all of them are ready, or none is; `ready` asks for those alone."""
        models = await self.service.refresh()
        reason = await self.service.not_ready()
        if ready and reason:
            return []
        state = "UNAVAILABLE" if reason else "READY"
        return [
            {"name": name, "version": str(version), "state": state, "reason": reason}
            for name in listed_names(models)
            for version in versions_of(models[name])
        ]

    async def load(self, name: str, parameters: Any) -> None:
        """Fine for a model that is served as it is; plans decide about everything else.

        Raises:
            InferenceFailure: it is not served, or is to be loaded with another configuration or file.
        """
        if parameters:
            raise unsupported(
                "a model cannot be loaded with a configuration or files of its own",
                "add the file to the planner with `stageloom model add`",
            )
        if name not in await self.service.refresh():
            raise InferenceFailure(
                FailureKind.INVALID,
                f"failed to load '{name[:64]}', the active plan does not serve it",
                remedy="make a plan that does, with `stageloom plan create`, or start the agent with --model",
            )

    async def unload(self, name: str) -> None:
        """Never done here.

        Raises:
            NotFoundError: there is no such model.
            InferenceFailure: there is.
        """
        if name not in await self.service.refresh():
            raise NotFoundError(f"failed to unload '{name[:64]}', no such model is served")
        raise InferenceFailure(
            FailureKind.UNAVAILABLE,
            f"explicit model load / unload is not allowed: the active plan serves '{name}'",
            remedy="push a plan without it",
        )

    def region_status(self, name: str) -> dict[str, dict[str, Any]]:
        """The regions by name."""
        return {
            region.name: {
                "name": region.name,
                "key": region.key,
                "offset": region.offset,
                "byte_size": region.byte_size,
            }
            for region in self.regions.status(name).values()
        }


def no_cuda() -> InferenceFailure:
    """The answer to all that is about CUDA's shared memory."""
    return unsupported("CUDA shared memory is not supported", "use system shared memory")


def no_trace() -> InferenceFailure:
    """The answer to all that is about trace settings."""
    return unsupported("the server does not support tracing", "use `stageloom-agent trace`")


def no_log_settings() -> InferenceFailure:
    """The answer to all that is about log settings."""
    return unsupported("the server does not support dynamic logging", "use the agent's setting log_level")
