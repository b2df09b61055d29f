"""Every error the service raises on purpose. One positional message each, so they cross Ray as they are."""


class RolloutError(Exception):
    """Base of everything raised on purpose."""


class RequestError(RolloutError):
    """One request is wrong; it alone fails, and nothing else is touched."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single new token in the context."""


class TokenRangeError(RequestError):
    """An id lies outside the vocabulary."""


class SamplingParamsError(RequestError):
    """A sampling parameter is unknown or has a value that means nothing."""


class DuplicateRequestError(RequestError):
    """A live request already has this (uid, sample index), in this attempt or a later one."""


class NumericError(RequestError):
    """The policy produced NaN or infinity for this sequence; nothing was sampled from it."""


class DeadlineError(RequestError):
    """The request's deadline passed; what it had committed is returned with it."""


class AbortedError(RequestError):
    """The caller, or a weight update with ``in_flight=abort``, ended the request."""


class EngineCrashError(RequestError):
    """The engine failed in a round this request lived through; the tokens returned with it are good."""


class HostLostError(RequestError):
    """The host died and the request could not be re-run under the same numerics."""


class FingerprintError(RolloutError):
    """Two hosts' numerics differ, so "same seed, same text" does not hold between them."""


class WeightUpdateError(RolloutError):
    """An update was refused whole; the old version keeps serving. Names every tensor at fault."""


class UnsupportedError(RolloutError):
    """The engine cannot do what was asked; its traits say what it can."""


class NoProgressError(RolloutError):
    """A round with decode sequences committed nothing: a bug, never a state to wait in."""


class ClusterError(RolloutError):
    """Ray could not be started or joined; the message says what it answered."""


class ServiceGoneError(RolloutError):
    """The service a client talks to was closed, or its process died."""


class ConfigError(RolloutError):
    """A setting is unknown or wrong; the message starts with its full path."""


class CapacityError(RequestError):
    """The KV pool could not hold this sequence even if it ran alone."""
