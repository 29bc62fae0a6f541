"""Whether a document that a command printed is of its declared type: every key, and no other."""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

from tests.support.documents import DOCUMENTS, keys_of


def faults_of(command: str, document: object) -> list[str]:
    """Return the differences from each of the command's types; none if it is of one of them."""
    found = []
    for declared in DOCUMENTS[command]:
        kind = Annotated[declared.parts] if len(declared.parts) > 1 else declared.parts[0]
        faults = list(_faults(list[kind] if declared.is_list else kind, document, command))
        if not faults:
            return []
        found.append(f"as {declared.options or 'usual'}: {'; '.join(faults)}")
    return found


def _faults(kind: Any, value: Any, where: str) -> Iterator[str]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if origin is Annotated:
        yield from _object(arguments, value, where)
    elif is_dataclass(kind) or is_typeddict(kind):
        yield from _object((kind,), value, where)
    elif origin in (Union, types.UnionType):
        each = [list(_faults(one, value, where)) for one in arguments]
        if all(each):
            yield min(each, key=len)[0]
    elif origin is Literal:
        if value not in arguments:
            yield f"{where} is {value!r}, not one of {arguments}"
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            yield f"{where} must be an object"
            return
        for name, item in value.items():
            yield from _faults(arguments[0], name, f"a name in {where}")
            yield from _faults(arguments[1], item, f"{where}.{name}")
    elif origin is tuple and arguments[-1] is not ...:
        if not isinstance(value, list) or len(value) != len(arguments):
            yield f"{where} must be a list of {len(arguments)}"
            return
        for number, (one, item) in enumerate(zip(arguments, value, strict=True)):
            yield from _faults(one, item, f"{where}[{number}]")
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        if not isinstance(value, list):
            yield f"{where} must be a list"
            return
        for number, item in enumerate(value):
            yield from _faults(arguments[0], item, f"{where}[{number}]")
    else:
        yield from _plain(kind, value, where)


def _object(parts: Sequence[Any], value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} must be an object"
        return
    keys = keys_of(*parts)
    missing = {name for name, key in keys.items() if key.is_required} - value.keys()
    if missing:
        yield f"{where} lacks {sorted(missing)}"
    if unknown := value.keys() - keys.keys():
        yield f"{where} has {sorted(unknown)}, which its type does not"
    for name, item in value.items():
        if name in keys:
            yield from _faults(keys[name].type, item, f"{where}.{name}")


def _plain(kind: Any, value: Any, where: str) -> Iterator[str]:
    is_bool = isinstance(value, bool)
    right = {
        int: isinstance(value, int) and not is_bool,
        float: isinstance(value, int | float) and not is_bool,
        bool: is_bool,
        str: isinstance(value, str),
        bytes: isinstance(value, str) and all(char in "0123456789abcdef" for char in value),
        type(None): value is None,
    }
    if kind not in right:
        yield f"{where}: the checker does not know {kind}"
    elif not right[kind]:
        yield f"{where} is {value!r}, not {kind.__name__}"
