"""Hypothesis strategies for every configuration that can be written, with names that are hard to write in YAML."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from graphquant.config import ROLE_TARGETS, KVCacheScheme, QuantizationArgs, QuantizationConfig, QuantizationScheme
from graphquant.numerics import STRATEGIES

# No deadline: the machine may be busy. The examples of one test share its tmp_path, which is meant.
law = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
_OBSERVERS: st.SearchStrategy[tuple[str, dict[str, float]]] = st.one_of(
    st.just(("minmax", {})),
    st.tuples(
        st.just("percentile"), st.fixed_dictionaries({}, optional={"percentile": st.floats(51, 100) | st.just(99)})
    ),
    st.tuples(
        st.just("mse"),
        st.fixed_dictionaries({}, optional={"grid": st.integers(2, 200), "max_shrink": st.floats(0.01, 0.9)}),
    ),
    st.tuples(
        st.just("moving_average"), st.fixed_dictionaries({"averaging_constant": st.floats(1e-9, 1, exclude_min=True)})
    ),
)
# Cs are surrogates, which no UTF-8 file holds.
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
targets = st.one_of(
    st.sampled_from(ROLE_TARGETS),
    st.sampled_from(
        ["re:.*self_attn$", "re:.*(q|k|v)_proj$", "Linear", "model.layers.0.self_attn", "1", "null", "yes"]
    ),
    names.filter(lambda name: not name.startswith(("re:", "role:"))),
)


@st.composite
def args(draw: st.DrawFn) -> QuantizationArgs:
    """Any valid QuantizationArgs."""
    kind = draw(st.sampled_from(["int", "uint", "float"]))
    strategy = draw(st.sampled_from(STRATEGIES))
    observer, observer_kwargs = draw(_OBSERVERS)
    return QuantizationArgs(
        num_bits=8 if kind == "float" else draw(st.integers(2, 8)),
        type=kind,
        symmetric=kind == "float" or draw(st.booleans()),
        strategy=strategy,
        group_size=draw(st.integers(1, 4096)) if strategy == "group" else None,
        dynamic=draw(st.sampled_from([None, strategy == "token"])),
        observer=observer,
        observer_kwargs=observer_kwargs,
        float_format=draw(st.sampled_from(["e4m3", "e5m2"])) if kind == "float" else "e4m3",
    )


_maybe = st.none() | args()


@st.composite
def schemes(draw: st.DrawFn) -> QuantizationScheme:
    """Any valid QuantizationScheme."""
    given = draw(
        st.one_of(
            st.fixed_dictionaries({"input_activations": args(), "output_activations": _maybe}),
            st.fixed_dictionaries({"output_activations": args()}),
            st.fixed_dictionaries({"query_states": args(), "key_states": _maybe, "output_activations": _maybe}),
            st.fixed_dictionaries({"key_states": _maybe, "value_states": args()}),
        )
    )
    return QuantizationScheme(targets=tuple(draw(st.lists(targets, min_size=1, max_size=3))), **given)


@st.composite
def kv_schemes(draw: st.DrawFn) -> KVCacheScheme:
    """Any valid KVCacheScheme: both alike, both different, or one alone."""
    key = draw(args())
    value = draw(st.one_of(st.just(key), st.none(), args()))
    return KVCacheScheme(key=key, value=value) if draw(st.booleans()) else KVCacheScheme(key=value, value=key)


@st.composite
def configs(draw: st.DrawFn) -> QuantizationConfig:
    """Any valid QuantizationConfig."""
    groups = draw(st.dictionaries(names, schemes(), max_size=2))
    return QuantizationConfig(
        config_groups=groups,
        ignore=tuple(draw(st.lists(targets, max_size=2))),
        kv_cache_scheme=draw(st.none() | kv_schemes()) if groups else draw(kv_schemes()),
    )
