"""Compare the formula of each attention with what the user expects of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from qknorm.auditor import thresholds as at
from qknorm.auditor.findings import Finding, finding
from qknorm.auditor.formula import order_with_uneven_gains
from qknorm.auditor.guard import Guarded, NotUnderstoodError
from qknorm.auditor.rules import AuditedLayer

# The properties that may be expected, each with the words or the type of its values.
KEYS: dict[str, type | tuple[str, ...]] = {
    "causal": bool,
    "window": int,
    "norm": ("head", "full", "heads", "none"),
    "order": ("before_rope", "after_rope"),
    "eps": float,
    "scale": float,
    "sink": ("none", "off_by_one", "logit", "token"),
}
Value = bool | int | float | str | None
WORDS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True)
class Expected:
    """One expected property of the attentions whose paths match a pattern."""

    pattern: str
    key: str
    value: Value

    def __str__(self) -> str:
        return f"{self.key}={_word(self.value)}"


def parse(expect: Mapping[str, object]) -> list[Expected]:
    """Parse expectations.

    Args:
        expect: values by key. A key is one of KEYS, as in `{"causal": True}`, or a pattern of module
            paths and one of KEYS, as in `{"model.layers.0.*:window": 32}`. Values may be words as on the
            command line, such as "yes" and "none".

    Returns:
        The expectations.

    Raises:
        ValueError: a key or a value is unknown.
    """
    found = []
    for name, value in expect.items():
        pattern, _, key = name.rpartition(":")
        if key not in KEYS:
            raise ValueError(f"{key!r} cannot be expected, only {', '.join(KEYS)}")
        found.append(Expected(pattern or "*", key, _value(key, value)))
    return found


def _value(key: str, value: object) -> Value:
    kind, text = KEYS[key], str(value).lower()
    if isinstance(kind, tuple):
        if text in kind:
            return text
        raise ValueError(f"{key} is expected to be one of {', '.join(kind)}; got {value!r}")
    if kind is bool and text in WORDS:
        return WORDS[text]
    if kind is int and text == "none":
        return None
    try:
        number = math.nan if kind is bool else kind(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        what = {bool: "yes or no", int: "a number of keys or none"}.get(kind, "a positive number")
        raise ValueError(f"{key} is expected to be {what}; got {value!r}")
    return number


def check(expected: list[Expected], layer: AuditedLayer, not_probed: list[str]) -> Iterator[Finding]:
    """QK024: compare the formula with what is expected.

    Args:
        expected: the expectations.
        layer: the attention.
        not_probed: receives a sentence for each expectation that cannot be decided.

    Yields:
        A finding for each difference.
    """
    for one in expected:
        if not fnmatchcase(layer.path, one.pattern):
            continue
        with Guarded(not_probed, f"{layer.path}, expected {one}"):
            found = _found(one, layer)
            if not all(_is_same(one, value) for value in found):
                words = " and ".join(dict.fromkeys(map(_word, found)))
                text = f"{one.key} is expected to be {_word(one.value)} and is {words}"
                evidence = {"key": one.key, "expected": _word(one.value), "found": words}
                yield finding("QK024", layer.path, text, **evidence)


def unchecked(expected: list[Expected], read: Collection[str], every: Collection[str]) -> Iterator[str]:
    """List expectations that were not checked.

    Args:
        expected: the expectations.
        read: the paths of the attentions whose formula was read.
        every: the paths of all attentions.

    Yields:
        A sentence for each expectation that matches no attention, and for each attention that it matches
        and whose formula was not read.
    """
    for one in expected:
        paths = [path for path in every if fnmatchcase(path, one.pattern)]
        yield from (
            f"{path}, expected {one}: it was not read back" for path in paths if path not in read
        )
        if not paths:
            yield f"expected {one}: no attention is called {one.pattern}"


def _found(one: Expected, layer: AuditedLayer) -> list[Value]:
    """Return the property that was read, for q and for k where they may differ."""
    f, sides, tokens = layer.f, layer.normed, layer.site.raw_shape("k")[1]
    if one.key in ("causal", "window", "sink") and f.causal is None:
        raise NotUnderstoodError("its logits were not seen")
    if one.key == "causal":
        if tokens < 2:
            raise NotUnderstoodError("the model was called with one token")
        return [f.causal]
    if one.key == "window":
        if f.window is None and not layer.scores.is_plain:
            raise NotUnderstoodError("causality and a window do not explain the mask")
        if f.window is None and one.value is not None and tokens <= int(one.value):
            raise NotUnderstoodError(f"the model was called with {tokens} tokens")
        return [f.window]
    if one.key == "order":
        is_open = f.order == "not identifiable"
        order = order_with_uneven_gains(layer.site, sides, f.rope) if is_open else f.order
        if order in (None, "not identifiable"):
            raise NotUnderstoodError("there is an order only where there are a gain and RoPE")
        return [f"{order}_rope"]
    if one.key == "scale" and f.scale is None:
        raise NotUnderstoodError("its logits are no known function of q.k")
    if one.key == "norm":
        return [side.fit.key[1] or "none" for side in layer.sides.values()]
    if one.key == "eps":
        return [side.eps for side in sides.values()] or [None]
    return [f.scale] if one.key == "scale" else [f.sink or "none"]


def _is_same(one: Expected, found: Value) -> bool:
    if KEYS[one.key] is not float or found is None:
        return found == one.value
    close = at.EPS_AS_EXPECTED if one.key == "eps" else at.AS_EXPECTED
    return math.isclose(float(found), float(one.value or 0.0), rel_tol=close)


def _word(value: Value) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
