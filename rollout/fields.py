"""What a caller may put into a field. Each function returns the plain Python value it stands for, or raises.

Numpy's integers and floats become int and float, so that equal values are equal wherever they travel.
Nothing is guessed: a float is no count, a string no number, and True is not 1.
"""

import operator
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any

from rollout.errors import RequestError, TokenRangeError

LIMIT = 2**63
"""Counts and ids lie below it, so that every format they are written in can hold them."""


def whole(name: str, value: Any, error: type[RequestError] = RequestError) -> int:
    """Return a whole number, of whatever integer type. Raises ``error``."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):  # ValueError: a tensor of several
        number = None
    if number is None:
        raise error(f"{name} must be a whole number, got {shown(value)}")
    return number


def count(name: str, value: Any, error: type[RequestError] = RequestError) -> int:
    """Return a whole number in 0 .. 2**63 - 1. Raises ``error``."""
    number = whole(name, value, error)
    if not 0 <= number < LIMIT:
        raise error(f"{name} must be in 0 .. 2**63 - 1, got {shown(number)}")
    return number


def real(name: str, value: Any, error: type[RequestError] = RequestError) -> float:
    """Return a real number as a float, NaN and infinities included. Raises ``error``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise error(f"{name} must fit a float, got {shown(value)}") from None


def flag(name: str, value: Any, error: type[RequestError] = RequestError) -> bool:
    """Return a truth value, which nothing else stands for. Raises ``error``."""
    if not isinstance(value, bool):
        raise error(f"{name} must be true or false, got {shown(value)}")
    return value


def text(name: str, value: Any, error: type[RequestError] = RequestError) -> str:
    """Return a string that has a UTF-8 form. Raises ``error``."""
    if not isinstance(value, str):
        raise error(f"{name} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(f"{name} must be valid Unicode, got {shown(value)}") from None
    return str(value)


def items(name: str, value: Any, error: type[RequestError] = RequestError) -> tuple[Any, ...]:
    """Return the members of a list, tuple or array, in order. Raises ``error``."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping | Set):
        raise error(f"{name} must be a list, got {type(value).__name__}")
    try:
        return tuple(value)
    except TypeError:  # an array of no dimension is iterable by its type only
        raise error(f"{name} must be a list, got {shown(value)}") from None


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return ids that may be tokens; only the engine knows the vocabulary. Raises ``TokenRangeError``."""
    members = items(name, value, TokenRangeError)
    ids = tuple(whole(f"{name}[{at}]", v, TokenRangeError) for at, v in enumerate(members))
    wrong = [v for v in ids if not 0 <= v < LIMIT]
    if wrong:
        raise TokenRangeError(f"{name} holds {shown(wrong[:5])}, which are no token ids")
    return ids


def shown(value: Any) -> str:
    """Return a value as a message may carry it: short, and never an error of its own."""
    try:
        words = ascii(value)
    except Exception:  # noqa: BLE001 - anybody's __repr__; an integer of thousands of digits raises, too
        words = f"a value of type {type(value).__name__}"
    return words if len(words) <= 80 else f"{words[:77]}..."
