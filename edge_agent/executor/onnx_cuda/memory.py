"""The memory of one loaded plan on a device: a place for every tensor in every slot, and the arenas.

All of it is one piece that is taken when the plan is loaded and stays where it is, so that sessions are bound
once. A slot needs no second place for run-ahead: the core lets it be overwritten only after its last reader.
"""

from stageloom.edge_agent.executor.onnx_cuda.device import OrtDevice
from stageloom.edge_agent.executor.onnx_cuda.recipe import PlanRecipes, Recipe, Value, aligned
from stageloom.shared.errors import ExecutorError
from stageloom.shared.ids import TensorId
from stageloom.shared.plan import Member


class PlanMemory:
    """See the module's text."""

    def __init__(self, recipes: PlanRecipes, device: OrtDevice) -> None:
        self._device = device
        self._bound = recipes.bound
        self.nbytes = recipes.memory_bytes
        self._begin = address = device.allocate(max(1, self.nbytes))
        self._slots: dict[tuple[int, int, TensorId], int] = {}
        for place, nbytes in recipes.slots():
            self._slots[place] = address
            address += aligned(nbytes)
        # One lane runs one step at a time, so that its steps can share an arena; lanes cannot.
        self._arenas: list[int] = []
        self._room = list(recipes.arena_bytes)
        shared = self._bound.plan.lanes == 1
        for index, nbytes in enumerate(recipes.arena_bytes):
            self._arenas.append(address)
            if shared:
                self._room[index] = max(recipes.arena_bytes)
            else:
                address += aligned(nbytes)

    def slot(self, member: Member, tensor: TensorId) -> int:
        """The address of a tensor in the slots of a replica."""
        return self._slots[member.model, member.replica, tensor]

    def check(self, recipe: Recipe) -> None:
        """Raises:
        ExecutorError: the recipe needs more than the plan has room for.
        """
        if recipe.arena_bytes > self._room[recipe.combined]:
            raise ExecutorError(
                f"a program needs {recipe.arena_bytes} bytes where its plan has "
                f"{self._room[recipe.combined]}",
                remedy="its members run one after another",
            )

    def address(self, recipe: Recipe, value: Value) -> int:
        """Where a value lies."""
        if value.in_slot:
            return self.slot(self._bound.combined[recipe.combined].members[value.position], value.tensor)
        return self._arenas[recipe.combined] + recipe.offsets[value]

    def free(self) -> None:
        """Give it back; nothing on the device uses it any more."""
        self._device.free(self._begin)
