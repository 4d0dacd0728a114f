"""QuantizationArgs: how one tensor is quantized, in the vocabulary of compressed-tensors.

``uint`` and ``float_format`` are additions; ``attn_head_channel`` is an additional strategy. Invariant: an instance
can be applied somewhere, since whatever does not depend on a tensor's shape has been checked when it was made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from graphquant.config.reading import FrozenMap, check_keys, did_you_mean, located, read_mapping
from graphquant.errors import ConfigError, StrategyError
from graphquant.numerics import STRATEGIES, QuantDtype, quant_dtype
from graphquant.numerics.dtypes import FLOAT_FORMATS, TYPES
from graphquant.numerics.strategies import UNBUILT_STRATEGIES
from graphquant.observers import make_observer

DEFAULT_OBSERVER = "minmax"
DEFAULT_FLOAT_FORMAT = "e4m3"
_UNSUPPORTED_KEYS = ("block_structure", "actorder", "scale_dtype", "zp_dtype")
_NULL_MEANS_OMITTED = ("strategy", "group_size", "dynamic", "observer", "observer_kwargs")


@dataclass(frozen=True, kw_only=True)
class QuantizationArgs:
    """Number format, strategy and observer of one tensor.

    ``dynamic`` and ``observer`` may be given as None and are then filled in: dynamic is True for strategy ``token``
    and False for every other.

    Raises:
        ConfigError: a value of the wrong kind, or one that contradicts another.
        StrategyError: a strategy or number format that does not exist or is not built.
    """

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str = "tensor"
    group_size: int | None = None
    dynamic: bool | None = None
    observer: str = DEFAULT_OBSERVER
    observer_kwargs: Mapping[str, float] = field(default_factory=dict)
    float_format: str = DEFAULT_FLOAT_FORMAT

    def __post_init__(self) -> None:
        _check_number_format(self)
        _check_strategy(self)
        object.__setattr__(self, "dynamic", _resolve_dynamic(self.strategy, self.dynamic))
        if self.observer is None:
            object.__setattr__(self, "observer", DEFAULT_OBSERVER)
        if not isinstance(self.observer, str):
            raise ConfigError(f"observer must be a name, not {self.observer!r}")
        if not isinstance(self.observer_kwargs, Mapping):
            raise ConfigError(f"observer_kwargs must be a mapping, not {self.observer_kwargs!r}")
        make_observer(self.observer, self.observer_kwargs)
        object.__setattr__(self, "observer_kwargs", FrozenMap(self.observer_kwargs))

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Read the JSON form; ``where`` is put in front of error messages.

        Raises:
            ConfigError: an unknown key, an unsupported option, or values that ``QuantizationArgs`` refuses.
        """
        given = read_mapping(data, "quantization args", where)
        check_keys(given, _KEYS, where, tolerated=_UNSUPPORTED_KEYS)
        with located(where):
            for key in _UNSUPPORTED_KEYS:
                _check_unsupported(key, given.pop(key, None))
            for key in _NULL_MEANS_OMITTED:
                if given.get(key) is None:
                    given.pop(key, None)
            if "group_size" in given:
                given.setdefault("strategy", "group")
            args = cls(**given)
            # The constructor cannot tell a given e4m3 from the default, and int8 is not what its writer wanted.
            if "float_format" in given and args.type != "float":
                raise _float_format_needs_float(args)
        return args

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: plain values, which ``from_dict`` reads back as an equal object."""
        data: dict[str, Any] = {key: getattr(self, key) for key in _KEYS if key != "float_format"}
        data["observer_kwargs"] = dict(self.observer_kwargs)
        if self.float_format != DEFAULT_FLOAT_FORMAT:
            data["float_format"] = self.float_format
        return data

    @property
    def dtype(self) -> QuantDtype:
        """The number format."""
        return quant_dtype(self.type, self.num_bits, self.float_format)

    def summary(self) -> str:
        """The arguments in a few words, such as ``int4 asym group(32)`` or ``fp8_e4m3 tensor``."""
        symmetry = [] if self.type == "float" else ["sym" if self.symmetric else "asym"]
        strategy = f"group({self.group_size})" if self.strategy == "group" else self.strategy
        return " ".join([self.dtype.name, *symmetry, strategy, *(["dynamic"] if self.dynamic else [])])


_KEYS = tuple(entry.name for entry in fields(QuantizationArgs))


def _check_number_format(args: QuantizationArgs) -> None:
    """Check num_bits, type, symmetric and float_format, and write type and float_format in lower case."""
    for name, known in (("type", TYPES), ("float_format", FLOAT_FORMATS)):
        value = getattr(args, name)
        # compressed-tensors reads names in any case; lower() also makes a plain string of its str enums.
        plain = value.lower() if isinstance(value, str) else value
        if plain not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, not {value!r}{did_you_mean(value, known)}")
        object.__setattr__(args, name, plain)
    if isinstance(args.num_bits, bool) or not isinstance(args.num_bits, int):
        raise ConfigError(f"num_bits must be an integer, not {args.num_bits!r}")
    if not isinstance(args.symmetric, bool):
        raise ConfigError(f"symmetric must be true or false, not {args.symmetric!r}")
    if args.type != "float" and args.float_format != DEFAULT_FLOAT_FORMAT:
        raise _float_format_needs_float(args)
    if args.type == "float" and not args.symmetric:
        raise StrategyError("type float (fp8) has no zero point: set symmetric true, or use type int or uint")
    quant_dtype(args.type, args.num_bits, args.float_format)


def _float_format_needs_float(args: QuantizationArgs) -> ConfigError:
    return ConfigError(f"float_format {args.float_format!r} needs type float, not {args.type!r}")


def _check_strategy(args: QuantizationArgs) -> None:
    """Check strategy and group_size, and write strategy in lower case."""
    if not isinstance(args.strategy, str):
        raise StrategyError(f"strategy must be one of {', '.join(STRATEGIES)}, not {args.strategy!r}")
    strategy = args.strategy.lower()
    if strategy in UNBUILT_STRATEGIES:
        raise StrategyError(f"strategy {strategy!r} is not built yet; use one of {', '.join(STRATEGIES)}")
    if strategy not in STRATEGIES:
        guess = did_you_mean(strategy, STRATEGIES)
        raise StrategyError(f"unknown strategy {args.strategy!r}{guess} (known: {', '.join(STRATEGIES)})")
    object.__setattr__(args, "strategy", strategy)
    size = args.group_size
    if strategy == "group":
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise StrategyError(f"strategy 'group' needs a group_size that is an integer above 0, not {size!r}")
    elif size is not None:
        raise StrategyError(
            f"group_size {size!r} is given with strategy {strategy!r}, which has no groups; leave it out, or use "
            "strategy 'group'"
        )


def _resolve_dynamic(strategy: str, dynamic: object) -> bool:
    """Whether scales are computed in the graph, which is a matter of the strategy alone."""
    token = strategy == "token"
    if dynamic is None:
        return token
    if not isinstance(dynamic, bool):
        extra = " (compressed-tensors' 'local' is not built)" if dynamic == "local" else ""
        raise ConfigError(f"dynamic must be true, false or null, not {dynamic!r}{extra}")
    if dynamic and not token:
        raise StrategyError(
            f"dynamic true needs strategy 'token'; the scales of {strategy!r} are static: leave dynamic out"
        )
    if token and not dynamic:
        raise StrategyError("strategy 'token' is always dynamic: leave dynamic out, or set it true")
    return dynamic


def _check_unsupported(key: str, value: object) -> None:
    """Refuse an option of compressed-tensors without meaning here, unless it is null or says what is done anyway."""
    if key == "scale_dtype" and str(value) in ("torch.float32", "float32"):
        return
    if value is not None:
        hint = "; scales are always float32" if key == "scale_dtype" else ""
        raise ConfigError(f"{key} {value!r} is not supported{hint}: leave it out, or set it null")
