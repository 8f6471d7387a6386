"""Lowered models that loaded plans share: an artifact's weights are on the device once per precision."""

import threading

import torch

from stageloom.edge_agent.lowering.dtypes import Precision
from stageloom.edge_agent.lowering.model import ModelLowering
from stageloom.shared.artifact import Artifact
from stageloom.shared.engine.steps import PlanKey
from stageloom.shared.ids import Digest

ModelKey = tuple[Digest, Precision]


class SharedModels:
    """Models by artifact and precision, each as long as a plan holds it."""

    def __init__(self, device: torch.device, *, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._models: dict[ModelKey, ModelLowering] = {}
        self._users: dict[ModelKey, set[PlanKey]] = {}
        self._lock = threading.Lock()

    def hold(self, plan: PlanKey, artifact: Artifact, precision: Precision) -> ModelLowering:
        """The model, made if no plan has it.

        Raises:
            ExecutorError: it cannot be lowered.
        """
        key = (artifact.digest, precision)
        with self._lock:
            if key not in self._models:
                self._models[key] = ModelLowering(
                    artifact, device=self._device, precision=precision, channels_last=self._channels_last
                )
            self._users.setdefault(key, set()).add(plan)
            return self._models[key]

    def release(self, plan: PlanKey) -> None:
        """The plan is gone; models that no other plan holds go with it."""
        with self._lock:
            for key in [key for key, users in self._users.items() if plan in users]:
                self._users[key].discard(plan)
                if not self._users[key]:
                    del self._users[key], self._models[key]

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._models

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the device."""
        with self._lock:
            return sum(model.weights.held_bytes for model in self._models.values())
