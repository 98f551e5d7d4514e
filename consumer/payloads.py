"""Typed payloads: what a handler's annotation says about its events, and their payloads as that type.

``Envelope[Payment]`` for `Consumer.on`, ``list[Envelope[Payment]]`` for `Consumer.on_batch`. Dataclasses, msgspec Structs and
whatever else msgspec knows are read by msgspec, strictly: nothing is taken for a number because it looks like one. Pydantic's
models are read by pydantic, as they are configured.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, time
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec import inspect as types

from outbox.envelope import Envelope, is_json
from outbox.errors import PayloadMismatch, SettingsError

if sys.version_info >= (3, 14):
    from annotationlib import Format

    #: Annotations are evaluated when they are asked for there, and another parameter's may be a type checker's only.
    _signature = functools.partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    _signature = inspect.signature

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
#: The one message of msgspec's that quotes the payload.
_QUOTING = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
_PLACE = re.compile(r"(.*) - at `(?:(key)` in `)?\$(.*)`", re.DOTALL)


class Payload:
    """A type that payloads are to have.

    Raises:
        SettingsError: no payload could be read as that.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._read = _by_pydantic(kind) if _is_pydantics(kind) else _by_msgspec(kind)

    def typed(self, event: Envelope) -> Envelope:
        """The event with its payload as the type.

        Raises:
            PayloadMismatch: the payload does not fit; says where and which rule, never the value.
        """
        if self.kind is bytes:
            if is_json(event.content_type):
                raise PayloadMismatch("payload", f"is {event.content_type}, the handler wants bytes")
            return event
        if not is_json(event.content_type):
            raise PayloadMismatch("payload", f"is {event.content_type}, the handler wants JSON")
        try:
            return dataclasses.replace(event, payload=self._read(event.data))
        except PayloadMismatch:
            raise
        except Exception as error:  # a check of the type's own, whose text may quote the value
            raise PayloadMismatch("payload", f"is refused by its type: {type(error).__name__}") from None


def _by_msgspec(kind: Any) -> Callable[[bytes], Any]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    parts = set()
    for part in _parts(types.type_info(kind), set()):
        if isinstance(part, types.CustomType):
            raise SettingsError(f"no JSON is a {part.cls.__qualname__}")
        parts.add(type(part))
    delicate = not parts.isdisjoint({types.DecimalType, types.DateTimeType, types.TimeType})

    def read(data: bytes) -> Any:
        try:
            value = decoder.decode(data)
        except msgspec.ValidationError as error:
            raise _mismatch(error) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise PayloadMismatch("payload", f"cannot be read: {error}") from None
        if delicate:
            _refuse_ambiguous(value, "payload")
        return value

    return read


def _parts(info: object, seen: set[int]) -> Iterator[object]:
    """A type's description and all that it consists of, once each."""
    if isinstance(info, tuple):
        for each in info:
            yield from _parts(each, seen)
    elif isinstance(info, types.Type | types.Field) and id(info) not in seen:
        seen.add(id(info))
        yield info
        for name in info.__struct_fields__:
            yield from _parts(getattr(info, name), seen)


def _mismatch(error: msgspec.ValidationError) -> PayloadMismatch:
    text, path = str(error), ""
    if place := _PLACE.fullmatch(text):
        text, key, path = place.groups()
        path += ".<key>" if key else ""
    if error.__cause__ is not None:  # raised by the type's own check
        text = f"is refused by its type: {type(error.__cause__).__name__}"
    return PayloadMismatch(f"payload{path}", _QUOTING.sub(r"\1", text)[:200])


def _refuse_ambiguous(value: Any, path: str) -> None:
    """Refuse datetimes that mean another instant elsewhere, and decimals with which nobody can count."""
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise PayloadMismatch(path, "Expected a finite decimal")
    elif isinstance(value, datetime | time):
        if value.tzinfo is None:
            raise PayloadMismatch(path, f"Expected `{type(value).__name__}` with a timezone component")
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _refuse_ambiguous(getattr(value, name), f"{path}.{name}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _refuse_ambiguous(getattr(value, field.name, None), f"{path}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_ambiguous(key, f"{path}.<key>")
            _refuse_ambiguous(item, f"{path}[...]")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            _refuse_ambiguous(item, f"{path}[{index}]")


def _by_pydantic(kind: Any) -> Callable[[bytes], Any]:
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def read(data: bytes) -> Any:
        try:
            return adapter.validate_json(data)
        except ValidationError as error:
            # Its messages may quote the value: a validator's own, an unknown tag.
            first, *more = error.errors(include_url=False, include_context=False, include_input=False)
            path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            others = f", and {len(more)} more" if more else ""
            raise PayloadMismatch(f"payload{path}"[:200], f"{first['type']}{others}") from None

    return read


def _is_pydantics(kind: Any) -> bool:
    """Whether a type is a pydantic model or dataclass, or consists of such (``Deposit | Refund``)."""
    return hasattr(kind, "__pydantic_validator__") or any(map(_is_pydantics, typing.get_args(kind)))


# --- annotations ---------------------------------------------------------------------------------------------------


def payload_of(function: Callable[..., object], batch: bool) -> Payload | None:
    """The type that a handler's annotation gives its events' payloads; None: it says nothing about them.

    Raises:
        SettingsError: it cannot be called with two arguments; its annotation cannot be resolved or used.
    """
    if not callable(function):
        raise SettingsError("cannot be called")
    try:
        signature = _signature(function)
    except (TypeError, ValueError):  # of some builtins nobody knows it
        return None
    wanted = "(events, session)" if batch else "(event, session)"
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise SettingsError(f"must take two positional arguments, {wanted}: {error}") from None
    first = next(iter(signature.parameters.values()))
    if first.annotation is inspect.Parameter.empty or first.kind is inspect.Parameter.VAR_POSITIONAL:
        return None
    annotation = _resolved(function, first)
    events = annotation
    if typing.get_origin(annotation) in _LISTS:
        if not batch:
            raise SettingsError(
                f"gets one event, but {first.name} is annotated with {_shown(annotation)}: on_batch gives many"
            )
        (events,) = typing.get_args(annotation)
    elif batch and (events is Envelope or typing.get_origin(events) is Envelope):
        raise SettingsError(f"gets many events: annotate {first.name} with list[{_shown(annotation)}]")
    if isinstance(events, type) and events is not Envelope and _is_payload(events):
        raise SettingsError(f"gets envelopes: annotate {first.name} with Envelope[{_shown(events)}]")
    if typing.get_origin(events) is not Envelope:
        return None
    (kind,) = typing.get_args(events)
    if kind in (Any, object) or isinstance(kind, typing.TypeVar):
        return None
    try:
        return Payload(kind)
    except Exception as error:
        raise SettingsError(f"{_shown(kind)} cannot be the type of a payload: {error}") from error


def _is_payload(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or _is_pydantics(kind)


def _resolved(function: Callable[..., object], parameter: inspect.Parameter) -> Any:
    """A parameter's annotation as a type. Others' may name what only a type checker imports; they are left alone."""
    alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return typing.get_type_hints(alone, _globals(function), include_extras=True)[parameter.name]
    except Exception as error:
        raise SettingsError(
            f"the annotation of {parameter.name}, {_shown(parameter.annotation)}, cannot be resolved where the function is "
            f"defined ({type(error).__name__}: {error}); import its types there at run time"
        ) from error


def _globals(function: Any) -> dict[str, Any]:
    """The names around the function in a partial, a method, an object that can be called, or below a decorator."""
    while not (inspect.isfunction(function) and not hasattr(function, "__wrapped__")):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        elif not inspect.isfunction(method := type(function).__call__):
            return {}
        else:
            function = method
    return function.__globals__


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
