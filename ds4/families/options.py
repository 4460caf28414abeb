"""Reading a checkpoint's options and tensors so that none is overlooked: whatever was not asked for at the end is
refused by name.

An option that this version does not know may change the results; ignoring it would give a model that runs and is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ds4.errors import FileFormatError, UnsupportedError
from ds4.files import Checkpoint, Tensor
from ds4.files.base import quote

LARGEST = 1 << 24  # no dimension of a model is larger; keeps products of two far from any limit
MATRIX_FORMATS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ4_NL", "MXFP4"),
)
SCALED_FORMATS = ("FP8", "FP4")  # two tensors of the file, joined by the family that knows them
VECTOR_FORMATS = ("F32", "F16", "BF16")
_ALIGNMENT = {"F32": 4, "FP8": 1, "FP4": 1}  # bytes; all others begin with 16-bit numbers
_MISSING: Any = object()


class Options:
    """One object of options: config.json, its rope parameters, or the GGUF keys of one prefix. null counts as absent.

    Every reader marks its key as used and raises FileFormatError when the value is of the wrong kind or out of range.
    `defaults` stand for keys that are not there at all; a null takes the place of a default.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, prefix: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.where, self.prefix = where, prefix
        values = {**(defaults or {}), **values}
        self._values = {
            key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix) and value is not None
        }
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> list[str]:
        """The keys that have a value."""
        return list(self._values)

    def name(self, key: str) -> str:
        """The option as an error calls it."""
        return f"{self.where}: {self.prefix}{key}"

    def raw(self, key: str, default: Any = _MISSING) -> Any:
        self._used.add(key)
        value = self._values.get(key, default)
        if value is _MISSING:
            raise FileFormatError(f"{self.name(key)} is missing; the model cannot be run without it.")
        return value

    def count(self, key: str, default: Any = _MISSING, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`."""
        value = self.raw(key, default)
        if isinstance(value, np.ndarray):
            raise UnsupportedError(
                f"{self.name(key)} gives a number for each layer; this version reads one for all layers."
            )
        if type(value) is not int or not 1 <= value <= most:
            raise FileFormatError(f"{self.name(key)} is {quote(value)}; it must be a whole number from 1 to {most}.")
        return value

    def number(self, key: str, default: Any = _MISSING, above: float = 0.0) -> float:
        """A finite number above `above`."""
        value = self.raw(key, default)
        if type(value) not in (int, float) or not above < value < 1e30:
            raise FileFormatError(f"{self.name(key)} is {quote(value)}; it must be a number above {above:g}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise FileFormatError(f"{self.name(key)} is {quote(value)}; it must be true or false.")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise FileFormatError(f"{self.name(key)} is {quote(value)}; it must be text.")
        return value

    def object(self, key: str, default: Any = _MISSING, defaults: Mapping[str, Any] | None = None) -> Options:
        """The object under that key, as options of their own."""
        value = self.raw(key, default)
        if not isinstance(value, dict):
            raise FileFormatError(f"{self.name(key)} is {quote(value)}; it must be an object.")
        return Options(value, self.name(key), defaults=defaults)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses any value but the allowed ones, which mean "off" or "as this version does it"."""
        value = self.raw(key, None)
        if value is not None and not any(type(value) is type(good) and value == good for good in allowed):
            wanted = "where it is " + " or ".join(quote(good) for good in allowed) if allowed else "without it"
            raise UnsupportedError(f"{self.name(key)} is {quote(value)}; this version runs only models {wanted}.")

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Refuses the first option that nothing has read and that is not listed as harmless."""
        left = self._values.keys() - self._used - set(harmless)
        if left:
            raise UnsupportedError(
                f"{self.where}: the option {quote(self.prefix + min(left))} is not known to this version; it may "
                "change the results, so the model is not run."
            )


class Tensors:
    """Hands out a checkpoint's tensors under the core's names, each with its shape checked."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.taken: list[tuple[str, Tensor]] = []
        self._used: set[str] = set()

    def take(self, name: str, core_name: str, *shape: int) -> Tensor:
        """Adds the tensor `name` as `core_name`. Raises FileFormatError when it is absent or has another shape."""
        tensor = self.find(name, *shape)
        self.add(core_name, tensor)
        return tensor

    def add(self, core_name: str, tensor: Tensor) -> None:
        """Adds a tensor, or a part of one, that `find` has checked."""
        self.taken.append((core_name, tensor if _is_aligned(tensor) else _copy(tensor, tensor.data)))

    def add_factors(self, core_name: str, tensor: Tensor) -> None:
        """Adds a norm whose file holds w and that multiplies by 1 + w, as the factors in F32."""
        raw = np.frombuffer(tensor.data, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.format])
        if tensor.format == "BF16":
            raw = (raw.astype("<u4") << 16).view("<f4")
        with np.errstate(invalid="ignore"):
            factors = raw.astype("<f4") + np.float32(1)
        self.taken.append((core_name, _copy(tensor, factors, "F32")))

    def find(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, from now on a used one. Raises FileFormatError when it is absent or has another shape."""
        return self.find_as(name, MATRIX_FORMATS if len(shape) > 1 else VECTOR_FORMATS, *shape)

    def find_as(self, name: str, allowed: Sequence[str], *shape: int) -> Tensor:
        """The same for a tensor that is stored in one of `allowed`."""
        tensor = self.checkpoint.tensor(name)
        if tensor.format not in allowed:
            raise UnsupportedError(
                f"{self.checkpoint.path}: tensor {quote(name)} is stored as {tensor.format}; this version computes "
                f"with {', '.join(allowed)} there. Use a file in one of these formats."
            )
        if tensor.shape != shape:
            raise FileFormatError(
                f"{self.checkpoint.path}: tensor {quote(name)} has the shape {list(tensor.shape)}, but the options of "
                f"the model make it {list(shape)}; the files do not belong together or are damaged."
            )
        self._used.add(name)
        return tensor

    def skip(self, name: str) -> None:
        """Marks a tensor as known and not needed."""
        self._used.add(name)

    def finish(self) -> list[tuple[str, Tensor]]:
        """All that was taken. Refuses the first tensor of the checkpoint that was neither taken nor skipped."""
        left = self.checkpoint.tensors.keys() - self._used
        if left:
            raise UnsupportedError(
                f"{self.checkpoint.path}: holds {len(left)} tensor(s) that this version would not use, such as "
                f"{quote(min(left))}: the model has parts that it does not know, or more layers than its options say."
            )
        return self.taken


def _is_aligned(tensor: Tensor) -> bool:
    """The core reads elements where they lie; safetensors may put them at any byte."""
    return int(np.frombuffer(tensor.data, np.uint8).ctypes.data) % _ALIGNMENT.get(tensor.format, 2) == 0


def _copy(tensor: Tensor, data: memoryview | np.ndarray, format: str | None = None) -> Tensor:
    """The tensor with a copy of `data` in memory that is aligned and read-only."""
    copy = np.frombuffer(data, np.uint8).copy()
    copy.flags.writeable = False
    return Tensor(tensor.name, format or tensor.format, tensor.shape, memoryview(copy))
