"""How options are declared: frozen classes of pydantic, whose fields say what they may hold.

A refusal names the option with its section, the value, and what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar, dataclass_transform

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, CoreSchema, PydanticCustomError, core_schema

from ..errors import ConfigError, redacted
from ..primitives.options import did_you_mean

T = TypeVar("T")
Loc = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The values that a field may hold, in the words of a refusal; a ``Literal`` needs none."""

    text: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        text = self.text or f"one of {', '.join(schema['expected'])}"
        return core_schema.custom_error_schema(schema, "expected", custom_error_message=text)


@dataclasses.dataclass(frozen=True)
class Form:
    """The values that a field may hold, where a validator of its own refuses others: for readers alone."""

    text: str


Natural = Annotated[StrictInt, Field(ge=0), Allowed("an integer >= 0")]
Positive = Annotated[StrictInt, Field(ge=1), Allowed("an integer >= 1")]
Number = StrictInt | StrictFloat
"""An integer stays one: options are part of keys and digests."""
Seconds = Annotated[Number, Field(gt=0, lt=math.inf), Allowed("a number of seconds > 0")]
Text = Annotated[StrictStr, Field(min_length=1), Allowed("a non-empty string")]
PathText = Annotated[StrictStr, Field(min_length=1), Allowed("a path, or null")]


def expected(text: str) -> PydanticCustomError:
    """The error that a validator raises where its field's value is not what ``text`` allows."""
    return PydanticCustomError("expected", text)


def refuse(where: str | Loc, value: object, text: str, kind: str = "expected") -> NoReturn:
    """Raise what a validator of several fields finds wrong with the one at ``where``."""
    error = PydanticCustomError(kind, text)
    loc = (where,) if isinstance(where, str) else where
    raise ValidationError.from_exception_data("", [{"type": error, "loc": loc, "input": value}])


def fault_of(cls: type, error: ValidationError) -> tuple[Loc, object, str, str]:
    """The first fault found in a ``cls``: its place, the value there, the message, and its kind."""
    fault = error.errors(include_url=False)[0]
    loc = fault["loc"]
    if loc and isinstance(loc[0], int):  # given to the constructor by position
        loc = (dataclasses.fields(cls)[loc[0]].name, *loc[1:])
    text = str(fault["ctx"]["error"]) if fault["type"] == "value_error" else fault["msg"]
    return loc, fault["input"], text, fault["type"]


_adapters: dict[type, TypeAdapter[Any]] = {}


def adapter(cls: type) -> TypeAdapter[Any]:
    """The validator that makes a ``cls`` of a mapping.  It is kept, as requests look at options, too."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def checked(cls: type, options: object, missing: str) -> dict[str, Any]:
    """``options`` unchanged, if they are an object with no unknown key and all that ``cls`` needs."""
    if not isinstance(options, Mapping):
        raise expected("an object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(set(options) - set(fields), key=str):
        known = f"{', '.join(sorted(fields))}{did_you_mean(str(unknown[0]), fields)}"
        raise PydanticCustomError("unknown", f"unknown option {unknown[0]!r}; expected one of {known}")
    for f in fields.values():
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in options:
            refuse(f.name, None, missing, "missing")
    return dict(options)


@dataclass(frozen=True)
class ConfigSection:
    """Options that stand together; they are checked, whether a mapping or Python makes them."""

    section: ClassVar[str] = ""
    """The section's place among an engine's options."""
    missing: ClassVar[str] = ""
    """The message for an option that is not given and has no default."""

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, options: Any) -> Any:
        return options if isinstance(options, (cls, ArgsKwargs)) else checked(cls, options, cls.missing)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Self:
        """Build from plain JSON-like options; :class:`ConfigError` names the first that is not allowed."""
        try:
            return adapter(cls).validate_python(options)
        except ValidationError as e:
            raise ConfigError(cls.refusal(*fault_of(cls, e))) from None

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON-like options: the inverse of :meth:`from_mapping`."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def refusal(cls, loc: Loc, value: object, text: str, kind: str) -> str:
        """The message for what :func:`fault_of` says; passwords are left out of values."""
        names = (cls.section, *loc) if cls.section else loc
        path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).lstrip(".")
        given = redacted(repr(value))
        says = {
            "expected": f"{path}={given}: expected {text}" if path else f"expected {text}, got {given}",
            "missing": f"{path} is missing: {text}",
            "unknown": f"{path}: {text}" if path else text,
            "value_error": text,
        }
        return f"hypic config: {says.get(kind, f'{path}={given}: {text}')}"


def plain(value: Any) -> Any:
    """``value`` of an option in JSON's terms."""
    if dataclasses.is_dataclass(value):
        kind = {"type": value.type} if hasattr(value, "type") else {}
        return kind | {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def options(cls: type[T]) -> type[T]:
    """Make a :class:`ConfigSection` of ``cls``: its constructor raises :class:`ConfigError`."""
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    init: Callable[..., None] = made.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValidationError as e:
            raise ConfigError(made.refusal(*fault_of(made, e))) from None

    made.__init__ = __init__
    return made
