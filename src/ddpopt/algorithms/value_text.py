"""Users' values as texts: equal values have equal texts in all processes.

`repr` does not give such texts: that of a function, or of an object whose class has no `__repr__`,
has its address, and that of a set of strings has the order of this process's hashes.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import io
import logging
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

# Beyond these nothing is compared: an object may refer to half of the program.
_MOST_LEVELS = 6
_MOST_VALUES = 2000
# A longer text is shown by its beginning, and compared by a hash of all of it.
_LONGEST_SHOWN = 200
_MOST_NUMBERS_SHOWN = 16

# Objects of these types differ between equal ranks, as weights do before `attach`, so only their
# types are compared.
_BY_TYPE_ONLY = (torch.nn.Module, torch.optim.Optimizer, torch.Generator, io.IOBase)
_BY_REPR = (bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype)
_BY_NAME = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    type,
)


def text_of(value: Any) -> str:
    """A text of `value` that is equal on all ranks if the values are, as far as can be compared.

    Floats are exact, tensors and arrays are their values without the device, sets are sorted. A
    function is its module and name, an object its type and its attributes. Of what cannot be
    compared, the type is left, so that it is held against nobody.
    """
    text = _Writer().write(value)
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}... (hash {_hash(text.encode())})"


class _Writer:
    """Writes one value, and what it refers to."""

    def __init__(self) -> None:
        self._num_values = 0
        self._around: list[int] = []  # ids of what the present value is part of

    def write(self, value: Any) -> str:
        """The text of a value; its type alone where it is too deep, or cannot be compared."""
        self._num_values += 1
        is_part_of_itself = id(value) in self._around
        is_too_much = self._num_values > _MOST_VALUES or len(self._around) >= _MOST_LEVELS
        if type(value) in _BY_REPR:
            return repr(value)
        if is_part_of_itself or is_too_much:
            return _name_of(type(value))
        self._around.append(id(value))
        try:
            return self._write_new(value)
        except Exception:
            # Whatever code of users raises as they are asked: then it cannot be compared.
            return _name_of(type(value))
        finally:
            self._around.pop()

    def _write_new(self, value: Any) -> str:
        """The text of a value that is no part of itself; raises what the value's own code does."""
        kind = _name_of(type(value))
        text = _text_of_atom(value)
        if text is not None:
            return text
        if isinstance(value, types.MethodType):
            text = f"{_name_of(value.__func__)} of {self.write(value.__self__)}"
        elif isinstance(value, functools.partial):
            text = f"{kind}({self._join((value.func, value.args, value.keywords))})"
        elif isinstance(value, AbstractSet):
            text = f"{{{', '.join(sorted(map(self.write, value)))}}}"
        elif isinstance(value, Mapping):
            pairs = [f"{self.write(key)}: {self.write(item)}" for key, item in value.items()]
            text = f"{{{', '.join(sorted(pairs))}}}"
        elif isinstance(value, Sequence):
            text = f"({self._join(value)})"
            if type(value) not in (list, tuple):
                text = kind + text
        elif attributes := _attributes_of(value):
            pairs = [f"{name}={self.write(part)}" for name, part in attributes.items()]
            text = f"{kind}({', '.join(pairs)})"
        else:
            text = _own_text(value) or kind
        return text

    def _join(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.write, values))


def _text_of_atom(value: Any) -> str | None:
    """The text of what is not written part by part; None of anything else."""
    kind, text = _name_of(type(value)), None
    if isinstance(value, torch.Tensor):
        text = _text_of_tensor(value)
    elif _is_array(value):
        text = _text_of_array(value)
    elif isinstance(value, torch.device):
        text = value.type  # each rank has its own
    elif isinstance(value, enum.Enum):
        text = f"{kind}.{value.name}"
    elif isinstance(value, logging.Logger):
        text = f"{kind}({value.name})"
    elif isinstance(value, types.ModuleType):
        text = value.__name__
    elif isinstance(value, _BY_NAME):  # functions and classes
        text = _name_of(value)
    elif isinstance(value, _BY_TYPE_ONLY):  # modules, optimizers, generators, files
        text = kind
    elif isinstance(value, _BY_REPR):
        text = repr(value)  # of a class that derives from one of these
    return text


def _attributes_of(value: Any) -> dict[str, Any]:
    """The attributes that tell an object from others of its class.

    Empty for an object without `__dict__` whose class has a `__repr__`: that tells all.
    """
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if field.compare]
        return {f.name: getattr(value, f.name) for f in fields if hasattr(value, f.name)}
    if not hasattr(value, "__dict__"):
        if type(value).__repr__ != object.__repr__:  # type: ignore[comparison-overlap]
            return {}
        slots = {slot for each in type(value).__mro__ for slot in getattr(each, "__slots__", ())}
        return {name: getattr(value, name) for name in sorted(slots) if hasattr(value, name)}
    attributes: dict[str, Any] = vars(value)
    # A cached property may have been computed on some ranks only.
    computed = {
        name
        for name in attributes
        if isinstance(getattr(type(value), name, None), functools.cached_property)
    }
    return {name: attributes[name] for name in sorted(attributes.keys() - computed)}


def _own_text(value: Any) -> str:
    """What an object says of itself; "" if it says nothing, or its address."""
    text = repr(value)
    return "" if " at 0x" in text else text


def _text_of_tensor(tensor: torch.Tensor) -> str:
    """A tensor's values; of a parameter, and of what has no values to be read, what kind it is."""
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    is_plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_quantized)
    # Parameters become equal in `attach`, and not before.
    if isinstance(tensor, torch.nn.Parameter) or not is_plain or type(tensor) is not torch.Tensor:
        return f"{_name_of(type(tensor))} of {kind}"
    if tensor.numel() <= _MOST_NUMBERS_SHOWN:
        return f"{tensor.tolist()} of {tensor.dtype}"
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{kind} (hash {_hash(values.tobytes())})"


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # else it is no array
    return numpy is not None and isinstance(value, numpy.ndarray)


def _text_of_array(array: Any) -> str:
    kind = f"{array.dtype} {list(array.shape)}"
    if array.dtype.hasobject:  # its bytes are addresses
        return f"array of {kind}"
    if array.size <= _MOST_NUMBERS_SHOWN:
        return f"{array.tolist()} of {array.dtype}"
    return f"{kind} (hash {_hash(array.tobytes())})"


def _name_of(value: Any) -> str:
    """The module and the name of a class or a function."""
    module = getattr(value, "__module__", None) or ""
    # The script of rank 0 is __main__, also where the other ranks were spawned by it.
    module = "__main__" if module == "__mp_main__" else module
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return name if module in ("", "builtins") else f"{module}.{name}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
