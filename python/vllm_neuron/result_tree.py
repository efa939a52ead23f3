"""The return value of a step as a JSON tree, and the value put together again.

A tree is `[tag, value]`, see `TraceRecord.result`. Named tuples, dataclasses and subclasses of dict
are named by module and class. Such a class is looked up among the loaded modules and filled
without its constructor, so that neither reading nor rebuilding a tree imports or runs code.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MemberDescriptorType, ModuleType
from typing import Any

__all__ = [
    "NotRepresentable",
    "check_tree",
    "classes_of",
    "find_class",
    "missing_class",
    "rebuild",
    "result_tree",
]

_RETURN_TYPES = "torch.return_types."
_NESTING = 100
_OWN_LAYOUT = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex, BaseException)


class NotRepresentable(Exception):
    """A value that a tree cannot hold; its arguments are the reason and what to do."""


def result_tree(value: Any, leaf: Callable[[Any], list[Any] | None], depth: int = 0) -> list[Any]:
    """Describe a value.

    Args:
        value: what a step returns.
        leaf: the tree of a tensor, or None for a value that is none.
        depth: in how many others the value is.

    Raises:
        NotRepresentable: a value of another kind, an instance of a local class, or one that is
            nested deeper than `check_tree` takes.
    """
    if depth > _NESTING:
        raise NotRepresentable(
            "the step returns a value that is nested too deeply",
            f"Nest at most {_NESTING} lists, tuples, dicts and classes.",
        )
    found = leaf(value)
    if found is not None:
        return found
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return ["const", value]
    if kind is float:
        return ["float", value.hex()]
    if kind in (list, tuple):
        return [kind.__name__, [result_tree(item, leaf, depth + 1) for item in value]]
    if kind is dict and _plain_keys(value):
        return ["dict", _pairs(value.items(), leaf, depth)]
    if isinstance(value, tuple):
        items = [result_tree(item, leaf, depth + 1) for item in value]
        if kind.__name__ == "Size" and kind.__module__ == "torch":
            return ["torch.Size", items]
        if _return_type(kind.__name__) is kind:
            return [f"{_RETURN_TYPES}{kind.__name__}", items]
        if _is_named_tuple(kind):
            return ["namedtuple", [_class_name(kind), items]]
    if _is_mapping(kind) and _plain_keys(value):
        attributes = _pairs(_attributes(value).items(), leaf, depth)
        return ["mapping", [_class_name(kind), _pairs(value.items(), leaf, depth), attributes]]
    if _is_dataclass(kind):
        return ["dataclass", [_class_name(kind), _pairs(_attributes(value).items(), leaf, depth)]]
    raise NotRepresentable(
        f"the step returns a {kind.__module__}.{kind.__qualname__}",
        "Return tensors, numbers, strings and None, in lists, tuples, dicts with keys that are "
        "strings or integers, named tuples and dataclasses.",
    )


def _pairs(items: Any, leaf: Callable[[Any], list[Any] | None], depth: int) -> list[list[Any]]:
    return [[key, result_tree(item, leaf, depth + 1)] for key, item in items]


def _plain_keys(value: Mapping[Any, Any]) -> bool:
    return all(type(key) in (str, int) for key in value)


def _attributes(value: Any) -> dict[str, Any]:
    """What an instance holds in its `__dict__` and slots."""
    held = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in held and hasattr(value, field.name):
                held[field.name] = getattr(value, field.name)
    return held


def _class_name(kind: type) -> str:
    """`module:Class` of a class that can be found by that name.

    Raises:
        NotRepresentable: it cannot.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if find_class(name) is not kind:
        raise NotRepresentable(
            f"the step returns an instance of {kind.__qualname__}, which module {kind.__module__} "
            "does not have by that name",
            "Define the class at the top of an imported module.",
        )
    return name


def find_class(name: str) -> type | None:
    """The class of that name, `module:Class`, if its module is loaded and has it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Not getattr: a module may import what it is asked for.
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    return found if isinstance(found, type) else None


def _is_named_tuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return issubclass(kind, tuple) and isinstance(fields, tuple)


def _is_mapping(kind: type) -> bool:
    # An instance of defaultdict cannot be made without its own constructor.
    return issubclass(kind, dict) and not issubclass(kind, defaultdict)


def _is_dataclass(kind: type) -> bool:
    # An instance of a class with a layout of its own cannot be made as a plain object.
    return dataclasses.is_dataclass(kind) and not issubclass(kind, _OWN_LAYOUT)


def _is_plain_attribute(kind: type, name: str) -> bool:
    """Whether setting an attribute of an instance runs no code but that of slots."""
    for base in kind.__mro__:
        if name in vars(base):
            held = vars(base)[name]
            return isinstance(held, MemberDescriptorType) or not hasattr(type(held), "__set__")
    return True


def _return_type(name: str) -> type | None:
    import torch

    found = getattr(torch.return_types, name, None)
    return found if isinstance(found, type) and issubclass(found, tuple) else None


def classes_of(tree: Any) -> Iterator[str]:
    """Yield the name of each class of a checked tree."""
    for _, value in _instances(tree):
        yield value[0]


def _instances(tree: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield tag and value of each instance of a class."""
    tag, value = tree
    items: list[Any] = []
    if tag in ("namedtuple", "mapping", "dataclass"):
        yield tag, value
        items = (
            value[1] if tag == "namedtuple" else [item for part in value[1:] for _, item in part]
        )
    elif tag == "dict":
        items = [item for _, item in value]
    elif tag in ("list", "tuple", "torch.Size") or tag.startswith(_RETURN_TYPES):
        items = value
    for item in items:
        yield from _instances(item)


def missing_class(tree: Any) -> str | None:
    """The first class of a checked tree that is not loaded, or has no such instances now."""
    for tag, value in _instances(tree):
        if not _fits(tag, find_class(value[0]), value):
            return value[0]
    return None


def _fits(tag: str, kind: type | None, value: list[Any]) -> bool:
    if kind is None:
        return False
    if tag == "namedtuple":
        return _is_named_tuple(kind) and len(value[1]) == len(getattr(kind, "_fields", ()))
    is_kind = _is_mapping(kind) if tag == "mapping" else _is_dataclass(kind)
    return is_kind and all(_is_plain_attribute(kind, name) for name, _ in value[-1])


def rebuild(tree: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """The value of a checked tree.

    Raises:
        ValueError: a class of it is not loaded.
    """
    tag, value = tree
    if tag == "output":
        return outputs[value]
    if tag == "input":
        return inputs[value]
    if tag == "const":
        return value
    if tag == "float":
        return float.fromhex(value)

    def items(trees: Sequence[Any]) -> list[Any]:
        return [rebuild(item, outputs, inputs) for item in trees]

    def pairs(trees: Sequence[Any]) -> dict[Any, Any]:
        return {key: rebuild(item, outputs, inputs) for key, item in trees}

    if tag == "dict":
        return pairs(value)
    if tag == "list":
        return items(value)
    if tag == "tuple":
        return tuple(items(value))
    if tag == "torch.Size":
        import torch

        return torch.Size(items(value))
    if tag.startswith(_RETURN_TYPES):
        return _known_return_type(tag)(items(value))
    kind = find_class(value[0])
    if kind is None or not _fits(tag, kind, value):
        raise ValueError(f"trace record: the class {value[0]} of the result is not loaded")
    if tag == "namedtuple":
        return tuple.__new__(kind, items(value[1]))
    if tag == "mapping":
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        found = base.__new__(kind)
        for key, item in pairs(value[1]).items():
            base.__setitem__(found, key, item)
    else:
        found = object.__new__(kind)
    for key, item in pairs(value[-1]).items():
        object.__setattr__(found, key, item)
    return found


def _known_return_type(tag: str) -> Any:
    found = _return_type(tag.removeprefix(_RETURN_TYPES))
    if found is None:
        raise ValueError(f"trace record: {tag} is not a return type of this torch")
    return found


def check_tree(tree: Any, outputs: int, inputs: int, depth: int = 0) -> None:
    """Check a tree that was read.

    Raises:
        ValueError: it is not a tree over so many outputs and inputs.
    """
    if depth > _NESTING:
        raise ValueError("trace record: result is nested too deeply")
    tag, value = _list(tree, 2)

    def check_items(items: Any, length: int | None = None) -> None:
        for item in _list(items, length):
            check_tree(item, outputs, inputs, depth + 1)

    def check_pairs(pairs: Any, *kinds: type) -> None:
        for pair in _list(pairs):
            key, item = _list(pair, 2)
            if type(key) not in kinds:
                raise ValueError(f"trace record: bad key {key!r:.80}")
            check_tree(item, outputs, inputs, depth + 1)

    if tag in ("output", "input"):
        count = outputs if tag == "output" else inputs
        if type(value) is not int or not 0 <= value < count:
            raise ValueError(
                f"trace record: result: expected an index below {count}, found {value!r:.80}"
            )
    elif tag == "const":
        if value is not None and type(value) not in (bool, int, str):
            raise ValueError(f"trace record: bad constant {value!r:.80}")
    elif tag == "float":
        if not isinstance(value, str):
            raise ValueError(f"trace record: bad float {value!r:.80}")
        try:
            float.fromhex(value)
        except OverflowError:
            raise ValueError(f"trace record: bad float {value!r:.80}") from None
    elif tag == "dict":
        check_pairs(value, str, int)
    elif tag == "torch.Size":
        for item in _list(value):
            if _list(item, 2)[0] != "const" or type(item[1]) is not int:
                raise ValueError(f"trace record: bad size {item!r:.80}")
    elif tag in ("list", "tuple"):
        check_items(value)
    elif tag == "namedtuple":
        check_items(_named(value, 2)[1])
    elif tag == "mapping":
        check_pairs(_named(value, 3)[1], str, int)
        check_pairs(value[2], str)
    elif tag == "dataclass":
        check_pairs(_named(value, 2)[1], str)
    elif isinstance(tag, str) and tag.startswith(_RETURN_TYPES):
        check_items(value, _known_return_type(tag).n_sequence_fields)
    else:
        raise ValueError(f"trace record: unknown tag {tag!r:.80} in result")


def _named(value: Any, length: int) -> list[Any]:
    name = _list(value, length)[0]
    module, colon, path = name.partition(":") if isinstance(name, str) else ("", "", "")
    parts = [*module.split("."), *path.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"trace record: bad class name {name!r:.80}")
    return value


def _list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        size = "" if length is None else f" of {length}"
        raise ValueError(f"trace record: result must hold lists{size}, found {value!r:.80}")
    return value
