"""The modules that standard values are on, and the envoys of an engine's tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from nnsight.intervention.envoy import Envoy
from torch import Tensor
from torch.nn import ModuleList

from .. import _layouts as layouts
from .. import architectures
from .._errors import Unavailable
from .._vocabulary import MIXTURE, MODULES, VOCABULARY, terms
from ..architectures import Architecture
from ._values import Value, unavailable


class Closed(Envoy):
    """An envoy that takes no value under a name of none, where it would reach nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not hasattr(getattr(type(self), name, None), "__set__"):
            hosts = VOCABULARY[name].hosts if name in VOCABULARY else ()
            raise AttributeError(
                f"{self.path} has no value {name!r} to write"
                + (f"; it is a value of {' and '.join(hosts)}" if hosts else "")
            )
        super().__setattr__(name, value)


class Named(Closed):
    """An envoy on which an unavailable value raises its own reason.

    When a descriptor raises ``AttributeError`` Python drops it and asks ``__getattr__``;
    this one raises the very object that was dropped.
    """

    kind: ClassVar[str] = ""
    """Which host of the vocabulary it is: ``"model"``, ``"layer"``, ``"self_attn"``, …"""

    absent: ClassVar[dict[str, str]] = {}
    """Why a standard module is not there, by its name."""

    def __getattr__(self, name: str) -> Any:
        raised = self.__dict__.pop("_raised", None)
        if raised is not None and raised[0] == name:
            raise raised[1]
        if MODULES.get(name) == self.kind and "_module" in self.__dict__:
            reason = self.absent.get(name, "the model has no such module")
            raise Unavailable(f"{self._label_of(name)} is unavailable: {reason}")
        return super().__getattr__(name)

    def _label_of(self, name: str) -> str:
        label = getattr(self, "label", "")
        return f"{label}.{name}" if label else name

    @classmethod
    def standard_values(cls) -> Iterator[Value]:
        """The values of this host, in the vocabulary's order."""
        for term in terms(cls.kind):
            yield getattr(cls, term.name)


class Blocks(Closed):
    """A list of modules that answers an index it does not have with ``IndexError``."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            raise IndexError(f"index {key} is out of range: {self.path} has {len(self)} entries")
        return super().__getitem__(key)


class Host(Named):
    """A block or one of its sublayers."""

    architecture: ClassVar[Architecture]

    @property
    def block(self) -> Any:
        """The decoder block it is or lies in."""
        raise NotImplementedError

    @property
    def facts(self) -> Architecture:
        """The architecture's facts for this model's config."""
        facts: Architecture | None = self.__dict__.get("_facts")
        if facts is None:
            facts = self.__dict__["_facts"] = self.architecture.of(self.config)
        return facts

    @property
    def index(self) -> int:
        """The block's index."""
        index: int = self.block._index
        return index

    @property
    def label(self) -> str:
        """Its standard path, for messages."""
        at = f"layers.{self.index}"
        return at if self.kind == "layer" else f"{at}.{self.kind}"

    @property
    def model_name(self) -> str:
        """The family and engine, for messages."""
        name: str = self.root.model_name
        return name

    @property
    def config(self) -> Any:
        """The model's text config."""
        return self.root.text_config


class Layer(Host):
    """A decoder block."""

    kind = "layer"

    on_block: ClassVar[dict[str, type[OnBlock]]] = {}
    """Sublayers whose modules lie on the block itself, by their standard names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_index"] = int(self.path.rsplit(".", 1)[-1])
        for name, host in self.on_block.items():
            self.__dict__[name] = host(self)

    @property
    def block(self) -> Layer:
        """The block itself."""
        return self

    layer_input: layouts.Residual = unavailable("this block's family does not say where it is")
    layer_mid: layouts.Residual = unavailable("this block's family does not say where it is")
    layer_output: layouts.Residual = unavailable("this block's family does not say where it is")

    absent: ClassVar[dict[str, str]] = {
        "self_attn": "this block mixes tokens by another module than attention",
        "linear_attn": "this block has no recurrent mixer; it mixes tokens by attention",
        "mlp": "this block has no feed-forward",
    }


class Sublayer(Host):
    """A module under a block."""

    @property
    def block(self) -> Any:
        """The block it lies in."""
        found = self.__dict__.get("_block")
        if found is None:
            found = self.parent
            while not isinstance(found, Layer):
                found = found.parent
            self.__dict__["_block"] = found
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_block"}


class OnBlock(Sublayer):
    """A sublayer that is no module of its own: its modules lie on the block.

    It has the standard values and the block's modules by name; what nnsight reads of a module
    it has not.
    """

    def __init__(self, block: Layer) -> None:
        # The envoy machinery belongs to the block; this is a view of it.
        self.__dict__.update(
            _block=block,
            path=block.path,
            interleaver=block.interleaver,
            _persistent_id=f"Envoy:{block.path}#{self.kind}",
        )

    @property
    def root(self) -> Any:
        """The model."""
        return self.block.root

    def get(self, path: str) -> Any:
        """A module of the block by its path."""
        return self.block.get(path)

    def __getattr__(self, name: str) -> Any:
        raised = self.__dict__.pop("_raised", None)
        if raised is not None and raised[0] == name:
            raise raised[1]
        return getattr(self.block, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label}, whose modules lie on the block)"


for _native in ("input", "inputs", "output", "source", "skip"):

    def _refuse(self: OnBlock, _name: str = _native) -> Any:
        error = Unavailable(
            f"{self.label} is no module, so it has no {_name}; read its standard values, or the "
            f"modules of {self.block.label}"
        )
        self.__dict__["_raised"] = (_name, error)
        raise error

    setattr(OnBlock, _native, property(_refuse))


class Attention(Sublayer):
    """A block's attention.

    Attributes:
        num_heads, num_kv_heads, head_dim, qk_head_dim: this block's own sizes.
    """

    kind = "self_attn"

    attention_input: layouts.Residual = unavailable("its family does not say where it is")
    attention_output: layouts.Residual = unavailable("its family does not say where it is")
    attention_queries: layouts.Queries = unavailable("its family does not say where it is")
    attention_keys: layouts.Keys = unavailable("its family does not say where it is")
    attention_values: layouts.Values = unavailable("its family does not say where it is")
    attention_scores: layouts.Pattern = unavailable("its family does not say where it is")
    attention_probabilities: layouts.Pattern = unavailable("its family does not say where it is")
    attention_head_outputs: layouts.HeadOutputs = unavailable("its family does not say where it is")

    @property
    def num_heads(self) -> int:
        """Query heads of this block."""
        return int(self.config.num_attention_heads)

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of this block."""
        return self.facts.num_kv_heads(self.config)

    @property
    def head_dim(self) -> int:
        """The width of a value head."""
        return self.facts.head_dim(self.config)

    @property
    def qk_head_dim(self) -> int:
        """The width of a query or key head."""
        return self.facts.qk_head_dim(self.config)


class Mlp(Sublayer):
    """A block's feed-forward.

    Attributes:
        intermediate_size: the number of its neurons.
    """

    kind = "mlp"

    mlp_input: layouts.Residual = unavailable("its family does not say where it is")
    mlp_output: layouts.Residual = unavailable("its family does not say where it is")
    mlp_neurons: layouts.Neurons = unavailable("its family does not say where it is")
    # Those of a mixture are said below to be none of a dense block's.
    router_logits: layouts.RouterLogits
    expert_weights: layouts.ExpertWeights
    expert_indices: layouts.ExpertIndices
    expert_outputs: layouts.ExpertOutputs
    routed_output: layouts.Residual
    shared_expert_output: layouts.Residual

    @property
    def intermediate_size(self) -> int:
        """The number of neurons."""
        return self.facts.intermediate_size(self.config)


DENSE = "a dense block routes nothing; only a mixture of experts has it"
UNSHARED = "this mixture has no shared expert; routed_output is all of mlp_output"
SPARSE = (
    "a mixture has no neurons of its own, each expert has; read expert_outputs, or routed_output"
)
WEIGHTED_INPUT = (
    "this model scales what enters an expert by its weight, so an expert has no unweighted output; "
    "read routed_output"
)

for _name in (term.name for term in terms("mlp") if term.name in MIXTURE):
    _value = unavailable(DENSE)
    _value.__set_name__(Mlp, _name)
    setattr(Mlp, _name, _value)


class Mixture(Mlp):
    """A mixture of experts for a feed-forward."""

    mlp_neurons: layouts.Neurons = unavailable(SPARSE)
    router_logits: layouts.RouterLogits = unavailable("its family does not say where it is")
    expert_weights: layouts.ExpertWeights = unavailable("its family does not say where it is")
    expert_indices: layouts.ExpertIndices = unavailable("its family does not say where it is")
    expert_outputs: layouts.ExpertOutputs = unavailable("its family does not say where it is")
    routed_output: layouts.Residual = unavailable("its family does not say where it is")
    shared_expert_output: layouts.Residual = unavailable("its family does not say where it is")

    @property
    def mixture(self) -> architectures.Mixture:
        """The facts of the architecture's mixtures."""
        found = self.facts.mixture
        assert found is not None
        return found

    @property
    def intermediate_size(self) -> int:
        """The number of neurons of one expert."""
        return self.mixture.intermediate_size(self.config)


def bound(base: type[Any], architecture: Architecture, **attributes: Any) -> type[Any]:
    """``base`` for one architecture: the class that a family keys a module class by."""
    members = {"architecture": architecture, "__module__": base.__module__, **attributes}
    return type(base.__name__, (base,), members)


def renames(
    architecture: Architecture, self_attn: type[Any] | None, mlp: type[Any] | None
) -> dict[Any, Any]:
    """A family's ``RENAME``: the standard names of an architecture's modules.

    The sublayers are keyed by their classes, which tell them from modules of the same name
    elsewhere in the tree.
    """
    found: dict[Any, Any] = {
        path: name
        for name in ("embed_tokens", "layers", "norm", "lm_head")
        if (path := getattr(architecture, name)) != name
    }
    for name, module in (("self_attn", self_attn), ("mlp", mlp)):
        if module is not None and getattr(architecture, name) not in (None, name):
            found[module] = name
    return found


def container_envoys() -> dict[Any, type[Envoy]]:
    """The envoys that every tree has, whatever its family."""
    return {ModuleList: Blocks}
