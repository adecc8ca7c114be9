"""Settings that describe themselves: help, bounds and option names of a dataclass field, its check, and its errors.

Values of some settings are names of open sets: scores, codecs and drafters, built-in or of other packages.
Imports neither MLX nor anything of this package, so that `--help` is fast.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from numbers import Real
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

MOST_TOKENS = 2**31 - 1  # MLX counts the elements of an axis in 32 bits
MAX_SHOWN = 60  # characters of a value in a message
QUOTES = "'\""
Member = TypeVar("Member")
Arguments = ParamSpec("Arguments")

# --- errors in the caller's terms -------------------------------------------------------------------------------------


class SettingError(ValueError):
    """A setting that cannot be used, or not in this combination.

    `str(error)` uses the Python names of settings; `render` those of another caller. In the template, `{bits}` is the
    name of a setting, `{bits:is}` its name and value ("bits is 7", "--kv-bits 7"), `{bits:=}` an argument ("bits=7",
    "--kv-bits 7"), `{bits:=32}` an argument of another value, and `{bits:omit}` the advice to leave it out. `{}` and
    `{0}` are other parts of the text.

    Args:
        template: the message, as above: problem, then fix.
        parts: values of `{}` and `{0}`.
        settings: values of settings, by their Python names.

    Example:
        >>> error = SettingError("{bits:is}: use {bits:=8} or {bits:=4}", bits=7)
        >>> str(error), error.render({"bits": "--kv-bits"})
        ('bits is 7: use bits=8 or bits=4', '--kv-bits 7: use --kv-bits 8 or --kv-bits 4')
    """

    def __init__(self, template: str, *parts: object, **settings: object) -> None:
        self.template, self.parts, self.settings = template, parts, settings
        super().__init__(self.render())

    def __reduce__(self) -> tuple[Any, ...]:  # the arguments of a ValueError are its message alone
        return _again, (self.template, self.parts, self.settings)

    def render(self, names: Mapping[str, str] | None = None) -> str:
        """The message with the caller's names for settings.

        Args:
            names: by Python name; names that begin with a dash are options. Other settings keep their Python names.
        """
        return _Template(names or {}).vformat(self.template, self.parts, self.settings)


def removed(setting: str, value: str, instead: str) -> SettingError:
    """The error of a value that earlier versions had.

    Args:
        setting: its name.
        instead: what to use, as a template.
    """
    return SettingError(f"{{{setting}:is}}, which was removed in 0.4: use {instead}", **{setting: value})


def _again(template: str, parts: tuple[object, ...], settings: dict[str, object]) -> SettingError:
    return SettingError(template, *parts, **settings)


class _Template(string.Formatter):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            return args[key]
        return _Mention(self._names.get(key, key), kwargs.get(key))


@dataclass(frozen=True)
class _Mention:
    """A setting in a message, by the caller's name for it."""

    name: str
    value: object

    def __format__(self, form: str) -> str:
        is_option = self.name.startswith("-")
        if form == "omit":
            return f"leave out {self.name}" if is_option else f"use {self.name}=None"
        if form == "is" and self.value is None and is_option:
            return f"{self.name} is not given"
        if form == "is":
            return f"{self.name} {option_value(self.value)}" if is_option else f"{self.name} is {shown(self.value)}"
        if form.startswith("="):
            other = form[1:]  # as Python writes it
            if is_option:
                return f"{self.name} {other.strip(QUOTES) or option_value(self.value)}"
            return f"{self.name}={other or shown(self.value)}"
        assert not form, form
        return self.name


def shown(value: object) -> str:
    """A value in one short line, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def option_value(value: object) -> str:
    """A value as it is written on the command line: one word, or two with a comma."""
    if isinstance(value, tuple):
        return ",".join("none" if one is None else str(one) for one in value)
    return value if isinstance(value, str) else shown(value)


# --- settings as fields -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The description of a field of a dataclass; `setting` makes the field.

    Attributes:
        help: one line, a noun or an imperative; by default the summary.
        option: its name on the command line, or several, such as ("--max-tokens", "-m"); none: it is no option.
        summary: one short line for `--help`; options without one are in `--help-all` only.
        metavar: of its value in `--help`.
        minimum, maximum: bounds of a number, inclusive.
        above: an exclusive lower bound.
        choices: words that an option takes; other values of a text are refused.
        removed: words that it took in earlier versions, and what to use instead (`removed`).
        words: the values of an option, by the words that stand for them on the command line.
        served: narrower bounds, inclusive, for requests to a server.
        unit: what a number counts, such as "tokens".
        default_text: the default in `--help`, where it depends on something.
        repr: whether the value is in the `repr` of the dataclass.
        kind: `int`, `float`, `bool`, `str`, a function from text, or a type of click; None: something else, which the
            dataclass checks itself. By default from the annotation.
        multiple: whether the option may be repeated.
        environment: a variable with the value.
        default, optional: the default of the field, and whether None is allowed: set by `settings_of`.
    """

    help: str = ""
    option: str | tuple[str, ...] = ()
    summary: str = ""
    metavar: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    words: Mapping[str, Any] | None = None
    served: tuple[float, float] | None = None
    unit: str = ""
    default_text: str | None = None
    repr: bool = True
    kind: Any = None
    multiple: bool = False
    environment: str | None = None
    default: Any = None
    optional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "help", self.help or self.summary)

    @property
    def options(self) -> tuple[str, ...]:
        """Its names on the command line."""
        return (self.option,) if isinstance(self.option, str) else self.option

    def wanted(self) -> str:
        """The values that it takes, in words: a number from 0 to 1."""
        if self.choices:
            return f"choose one of {', '.join(self.choices)}"
        number = "a whole number" if self.kind is int else "a number"
        number += f" of {self.unit}" if self.unit else ""
        if self.above is not None:
            low = f" above {_short(self.above)}"
            return f"give {number}{low}" + ("" if self.maximum is None else f" up to {_short(self.maximum)}")
        if self.minimum is None:
            return f"give {number}" if self.kind is int else "give a finite number"
        to = "up" if self.maximum is None else f"to {_short(self.maximum)}"
        return f"give {number} from {_short(self.minimum)} {to}"


def _field_of(describe: Callable[Arguments, Setting]) -> Callable[Concatenate[Any, Arguments], Any]:
    """Makes `setting`, which takes the attributes of `Setting` as arguments, each with its type."""

    def setting(default: Any, /, *arguments: Arguments.args, **attributes: Arguments.kwargs) -> Any:
        described = describe(*arguments, **attributes)
        return dataclasses.field(default=default, repr=described.repr, metadata={"setting": described})

    return setting


# A field of a frozen dataclass with this default and its description: setting(8, option="--bits", help="Bits.").
setting = _field_of(Setting)

_KINDS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}


@lru_cache
def settings_of(kind: type) -> dict[str, Setting]:
    """The descriptions of the fields of a dataclass that have one, by name and in order."""
    found = {}
    for field in dataclasses.fields(kind):
        if "setting" in field.metadata:
            described: Setting = field.metadata["setting"]
            annotation = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
            known = described.kind or _KINDS.get(annotation.removesuffix(" | None"))
            optional = field.default is None or annotation.endswith("| None")
            found[field.name] = dataclasses.replace(described, kind=known, optional=optional, default=field.default)
    return found


def check_settings(instance: Any) -> None:
    """Raises SettingError for the first field of a dataclass that has a value which its description does not allow.

    Integers and numbers of other types, such as NumPy's, become Python's.
    """
    for name, described in settings_of(type(instance)).items():  # type: ignore[arg-type,unused-ignore]
        value = getattr(instance, name)
        check_setting(name, value, described)
        if described.kind is int:
            integer_fields(instance, name)
        elif described.kind is float and value is not None and type(value) not in (int, float):
            object.__setattr__(instance, name, float(value))


def check_setting(name: str, value: object, described: Setting) -> None:
    """Raises SettingError for a value that the description of a setting does not allow.

    Numbers are finite, and booleans are none. Values of other kinds than numbers, texts and booleans pass.
    """
    if value is None and described.optional:
        return
    if described.choices and described.kind is str:
        allowed = isinstance(value, str) and value in described.choices
    elif described.kind is int:
        allowed = _is_whole(value) and _is_within(operator.index(value), described)  # type: ignore[arg-type]
    elif described.kind is float:
        allowed = is_number(value) and _is_within(value, described)
    elif described.kind in (bool, str):
        allowed = isinstance(value, described.kind)
    else:
        return
    if not allowed:
        raise SettingError(f"{{{name}:is}}: {{}}", _fix(value, described), **{name: value})


def _fix(value: object, described: Setting) -> str:
    if described.kind in (bool, str) and not described.choices:
        return "give True or False" if described.kind is bool else "give a text"
    if described.maximum is None and described.unit == "tokens" and is_number(value) and value > MOST_TOKENS:  # type: ignore[operator]
        described = dataclasses.replace(described, maximum=MOST_TOKENS)
    return described.wanted()


def whole_number(name: str, value: object, minimum: int = 0) -> int:
    """The value as an int.

    Raises:
        SettingError: it is not a whole number of tokens from `minimum` to 2^31 - 1.
    """
    check_setting(name, value, Setting(kind=int, minimum=minimum, unit="tokens"))
    return operator.index(value)  # type: ignore[arg-type]


def is_number(value: Any) -> bool:
    """Whether it is a real number, finite as a float; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def as_int(value: Any) -> Any:
    """An integer of any type, such as NumPy's, as Python's; other values, booleans among them, as they are."""
    return operator.index(value) if _is_whole(value) else value


def integer_fields(instance: Any, *names: str) -> None:
    """Makes integers of other types in these fields of a dataclass Python's."""
    for name in names:
        object.__setattr__(instance, name, as_int(getattr(instance, name)))


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _is_within(value: Any, described: Setting) -> bool:
    maximum = described.maximum
    if maximum is None and described.unit == "tokens":
        maximum = MOST_TOKENS
    low = -math.inf if described.minimum is None else described.minimum
    high = math.inf if maximum is None else maximum
    return low <= value <= high and (described.above is None or value > described.above)


def _short(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


# --- open sets of names -----------------------------------------------------------------------------------------------


class OpenSet(Generic[Member]):
    """Things of one kind and the names under which they are found.

    Args:
        kind: what one of them is called: the entry points are of the group `mlx_kv.<kind>s`, and what registers one is
            `register_<kind>`.
        alternative: what a caller can give instead of a name.
        ours: those of this package.
        read: makes a member of the name of an entry point and of the object that it loads.
        instead: what to use instead of members that were removed, by their names (`settings.removed`).
    """

    def __init__(
        self,
        kind: str,
        alternative: str,
        ours: Mapping[str, Member],
        read: Callable[[str, Any], Member] = lambda name, loaded: loaded,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.group, self._alternative, self._read = kind, f"mlx_kv.{kind}s", alternative, read
        self._instead = instead or {}
        self.registered = dict(ours)
        self._loaded: dict[str, Member] = {}

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """Of other packages, looked for once."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """All that `find` finds."""
        return sorted({*self.entries, *self.registered})

    def find(self, name: str) -> Member:
        """The one of a name: what was registered comes before what other packages bring.

        That is loaded when it is asked for: a package whose one cannot be used is in the way of no other.

        Raises:
            ValueError: none has this name.
        """
        if not isinstance(name, str):
            raise ValueError(f"{self.kind} is {name!r}: give a name, or {self._alternative}")
        if name in self.registered:
            return self.registered[name]
        if name not in self.entries and name in self._instead:
            raise removed(self.kind, name, self._instead[name])
        if name not in self.entries:
            raise ValueError(
                f"there is no {self.kind} {name!r}: choose one of {', '.join(self.names())}, give {self._alternative}, "
                f"or register_{self.kind}() one of that name"
            )
        if name not in self._loaded:
            self._loaded[name] = self._read(name, self.entries[name].load())
        return self._loaded[name]
