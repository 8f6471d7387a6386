"""What the lifecycle asks for by itself: artifacts, measurements, the policy to plan with. Pure."""

from collections.abc import Collection, Sequence

from stageloom.edge_agent.lifecycle import events as ev
from stageloom.edge_agent.lifecycle.events import Action
from stageloom.edge_agent.lifecycle.states import RunnablePlan
from stageloom.shared.ids import Digest
from stageloom.shared.messages.control import (
    ArtifactNeed,
    Desired,
    ProfileRequest,
    StageProfileRequest,
)


class Needs:
    """Asks for each artifact, profile and policy once, and again where that is due."""

    def __init__(self, *, again_s: float) -> None:
        """`again_s`: how long a fetch may take to begin before it is asked for again."""
        self.present: set[Digest] = set()
        self._again_s = again_s
        self._fetch_asked_s: dict[Digest, float] = {}
        self._profiles_asked: set[int] = set()
        self._policy_used: Digest | None = None  # the policy that the agent was told of

    def gone(self, digest: Digest) -> None:
        """An artifact was removed or found damaged."""
        self.present.discard(digest)
        if digest == self._policy_used:
            self._policy_used = None

    def forget_profiles(self, keep: Collection[int] = ()) -> None:
        """Whoever was asked for a profile other than those of `keep` does not know of it any more, or nobody
        wants it: a planner whose database was restored gives numbers again."""
        self._profiles_asked.intersection_update(keep)

    def missing(self, desired: Desired | None) -> list[ArtifactNeed]:
        """Artifacts of the desired plan that are not here."""
        return self._missing_of(desired.artifacts) if desired else []

    def named(self, desired: Desired | None, *, plan: bool) -> set[Digest]:
        """Artifacts of a desired value: its measurements', its policy and, with `plan`, its plan's."""
        if desired is None:
            return set()
        stages, policy = desired.stage_profile, desired.policy
        needs = [*(desired.artifacts if plan else ()), *(profile.artifact for profile in desired.profiles)]
        needs += stages.artifacts if stages is not None else ()
        return {need.digest for need in needs} | ({policy.digest} if policy is not None else set())

    def lost(self, plan: RunnablePlan) -> list[ArtifactNeed]:
        """Artifacts of a plan that ran here before that are not here any more."""
        return self._missing_of(plan.artifacts)

    def _missing_of(self, needs: Sequence[ArtifactNeed]) -> list[ArtifactNeed]:
        return [need for need in needs if need.digest not in self.present]

    def fetch(self, needs: Sequence[ArtifactNeed], now_s: float, *, connected: bool) -> list[Action]:
        """Fetch what was not asked for a moment ago."""
        if not connected:
            return []
        actions: list[Action] = []
        for need in needs:
            asked_s = self._fetch_asked_s.get(need.digest, float("-inf"))
            if now_s - asked_s >= self._again_s:
                self._fetch_asked_s[need.digest] = now_s
                actions.append(ev.FetchArtifact(need))
        return actions

    def policy(self, desired: Desired | None, now_s: float, *, connected: bool) -> list[Action]:
        """Fetch the policy that is desired, then say which one to plan with."""
        need = desired.policy if desired else None
        if need is not None and need.digest not in self.present:
            artifact = ArtifactNeed("policy", need.digest, need.size_bytes)
            return self.fetch([artifact], now_s, connected=connected)
        wanted = need.digest if need is not None else None
        if wanted == self._policy_used:
            return []
        self._policy_used = wanted
        return [ev.UsePolicy(wanted)]

    def profiles(
        self, desired: Desired | None, answered: Collection[int], now_s: float, *, connected: bool
    ) -> list[Action]:
        """Ask for the measurements that are desired, once their artifacts are here."""
        if desired is None:
            return []
        wanted: list[tuple[tuple[ArtifactNeed, ...], ProfileRequest | StageProfileRequest]] = [
            ((profile.artifact,), profile) for profile in desired.profiles
        ]
        if (stages := desired.stage_profile) is not None:
            wanted.append((stages.artifacts, stages))
        actions: list[Action] = []
        for needs, profile in wanted:
            if profile.request in answered or profile.request in self._profiles_asked:
                continue
            if missing := [need for need in needs if need.digest not in self.present]:
                actions += self.fetch(missing, now_s, connected=connected)
                continue
            self._profiles_asked.add(profile.request)
            actions.append(ev.RunProfile(profile))
        return actions


def requested(desired: Desired | None) -> set[int]:
    """The numbers of the measurements that are desired."""
    if desired is None:
        return set()
    stages = () if desired.stage_profile is None else (desired.stage_profile,)
    return {one.request for one in (*desired.profiles, *stages)}
