"""Layouts: the named axes of a value, in order, and the kind of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["float", "int", "sizes"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a value by name, outermost first.

    Attributes:
        axes: axis names, ``("batch", "seq", "hidden")``.
        kind: ``"float"`` for the model's dtype, ``"int"`` for token or expert ids,
            ``"sizes"`` for a plain tuple of integers instead of a tensor.
    """

    axes: tuple[str, ...]
    kind: Kind = "float"

    @classmethod
    def of(cls, axes: str, kind: Kind = "float") -> Layout:
        """``Layout.of("batch seq hidden")``."""
        return cls(tuple(axes.split()), kind)

    def axis(self, name: str) -> int | None:
        """The position of the axis ``name``, or ``None``."""
        return self.axes.index(name) if name in self.axes else None

    def __str__(self) -> str:
        return f"[{', '.join(self.axes)}]"


RESIDUAL = Layout.of("batch seq hidden")
TOKENS = Layout.of("batch seq", "int")
SIZES = Layout.of("batch seq", "sizes")
LOGITS = Layout.of("batch seq vocab")
PROBABILITIES = Layout.of("batch vocab")
NEURONS = Layout.of("batch seq neurons")
QUERIES = Layout.of("batch heads seq qk_head_dim")
KEYS = Layout.of("batch kv_heads seq qk_head_dim")
VALUES = Layout.of("batch kv_heads seq head_dim")
PATTERN = Layout.of("batch heads query key")
HEAD_OUTPUTS = Layout.of("batch seq heads head_dim")
ROUTER = Layout.of("batch seq experts")
EXPERT_WEIGHTS = Layout.of("batch seq top_k")
EXPERT_INDICES = Layout.of("batch seq top_k", "int")
EXPERT_OUTPUTS = Layout.of("batch seq top_k hidden")

# The types of values, for annotations; the layout rides along and can be checked.
TokenIds: TypeAlias = Annotated["Tensor", TOKENS]
Residual: TypeAlias = Annotated["Tensor", RESIDUAL]
Logits: TypeAlias = Annotated["Tensor", LOGITS]
Probabilities: TypeAlias = Annotated["Tensor", PROBABILITIES]
Neurons: TypeAlias = Annotated["Tensor", NEURONS]
Queries: TypeAlias = Annotated["Tensor", QUERIES]
Keys: TypeAlias = Annotated["Tensor", KEYS]
Values: TypeAlias = Annotated["Tensor", VALUES]
Pattern: TypeAlias = Annotated["Tensor", PATTERN]
HeadOutputs: TypeAlias = Annotated["Tensor", HEAD_OUTPUTS]
RouterLogits: TypeAlias = Annotated["Tensor", ROUTER]
ExpertWeights: TypeAlias = Annotated["Tensor", EXPERT_WEIGHTS]
ExpertIndices: TypeAlias = Annotated["Tensor", EXPERT_INDICES]
ExpertOutputs: TypeAlias = Annotated["Tensor", EXPERT_OUTPUTS]
