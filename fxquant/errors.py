"""Every exception of fxquant, one class per kind.

Each text says what went wrong, where (FQN, key, file or node), what was found, what was
expected, and what to do next.
"""

from __future__ import annotations


class FxquantError(Exception):
    """Base of every error that fxquant raises on purpose."""


class ConfigError(FxquantError):
    """An argument, option, scheme name or pattern is not valid."""


class CheckpointFileError(FxquantError):
    """A checkpoint file or index is missing, damaged, unsafe or not understood."""


class MissingWeightError(FxquantError):
    """The model has weights that the checkpoint does not hold."""


class WeightMismatchError(FxquantError):
    """A stored tensor does not fit the parameter: shape, dtype or size."""


class KeyMapError(FxquantError):
    """Names of the model and keys of the checkpoint cannot be related without guessing."""


class TiedWeightError(FxquantError):
    """The checkpoint holds different values for names that the model ties together."""


class ExtraWeightError(FxquantError):
    """``strict=True`` and the checkpoint holds tensors that the model does not use."""


class MissingBufferError(FxquantError):
    """Buffers of the model hold no values and no checkpoint or initializer gives them."""


class CaptureError(FxquantError):
    """The model cannot be captured as a graph in the way that was asked for."""


class RefusedError(FxquantError):
    """``strict=True`` and a layer that a scheme was asked for stays float."""


class QuantizedWeightError(FxquantError):
    """An operation that a quantized weight cannot carry out without giving wrong numbers."""


class GraphCheckError(FxquantError):
    """A pass left a graph that does not meet the invariants of its stage."""


class NotMaterializedError(FxquantError):
    """A lowered program was called before its constants were loaded."""


class BudgetError(FxquantError):
    """A memory budget that loading cannot keep.

    ``smallest``: the least bytes that would do on ``device``.
    """

    def __init__(self, text: str, *, smallest: int, device: str) -> None:
        super().__init__(text)
        self.smallest = smallest
        self.device = device
