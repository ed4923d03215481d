"""The bytes that autograd saves for the backward pass."""

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """A counter of the bytes that autograd saves while `hooks` is entered; storages of `without` are left out."""

    def __init__(self, without: list[Tensor]) -> None:
        self._without = {x.untyped_storage().data_ptr() for x in without}
        self.sizes: dict[int, int] = {}
        self.hooks = saved_tensors_hooks(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._without:
            self.sizes[storage.data_ptr()] = storage.nbytes()  # no storage is freed before the backward pass
        return x

    @property
    def total(self) -> int:
        """Return the number of bytes."""
        return sum(self.sizes.values())
