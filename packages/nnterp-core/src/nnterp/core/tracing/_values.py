"""The descriptor behind every standard value.

Reading one inside a block parks the block at the value's location, takes the value out of
what the model holds there, and hands out a private copy. Before the block moves on, the
copies that were edited are put back; the others never touch the model. Two notions of
nnsight's are used throughout: a *location* names a point of the forward, and its
*occurrence* counts the times a run has passed it (one a step).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from greenlet import getcurrent
from nnsight.intervention.eproperty import WriteBack, eproperty
from nnsight.intervention.interleaver import Mediator, OutOfOrderError
from nnsight.intervention.source import (
    STATE,
    SourceNotAvailable,
    compiled,
    decorator_chain,
    install_source,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import _errors
from .._errors import OutsideTrace, Unavailable, WrongShape
from .._layouts import Layout
from .._vocabulary import VOCABULARY, Term
from ._lenses import KEEP, Derived, Lens
from ._private import Private, clone, plain

Step: TypeAlias = Literal["prefill", "decode"]


class OutOfOrder(_errors.OutOfOrder, OutOfOrderError):
    """``nnterp.core.OutOfOrder`` as raised over nnsight: nnsight's own name catches it too."""


_WHOLE = Lens()


@dataclass(frozen=True)
class Site:
    """Where a value is on one engine.

    Attributes:
        at: host to location.
        lens: how the value lies in what is served there.
        read_only: how to get the edit's effect instead, where the value cannot be written.
        decode: why a decode step does not serve it, where it does not.
        prepare: what has to be in place before the forward passes the location.
    """

    at: Callable[[Any], str]
    lens: Lens = _WHOLE
    read_only: str | None = None
    decode: str | None = None
    prepare: Callable[[Any], None] | None = None

    @property
    def instead(self) -> str | None:
        """Why it cannot be written and what to write instead, or ``None``."""
        return self.lens.instead if isinstance(self.lens, Derived) else self.read_only


def own(suffix: str) -> Callable[[Any], str]:
    """The location ``suffix`` under the host itself."""
    return lambda host: f"{host.path}.{suffix}"


def under(path: Callable[[Any], str] | str, side: str) -> Callable[[Any], str]:
    """The ``side`` of a module named by its path under the host."""

    def at(host: Any) -> str:
        name = path if isinstance(path, str) else path(host)
        return f"{host.get(name).path}.{side}"

    return at


def beside(name: Callable[[Any], str], side: str) -> Callable[[Any], str]:
    """The ``side`` of a module named by its path under the host's block."""
    return lambda host: f"{host.block.get(name(host)).path}.{side}"


def reading(host: Any) -> Callable[[Any], str]:
    """The location of what an MLP reads: its own input, or that of its first module."""
    entered = host.facts.mlp_reads
    return own("input") if entered is None else beside(lambda _: entered, "input")


@dataclass
class _Held:
    value: Value
    host: Any
    site: Site
    view: Private

    def edited(self, raw: Any) -> bool:
        """Whether the copy differs from what was read, which was in ``raw``."""
        if self.view._version != self.view._handed_version:
            return True
        if not self.view._exposed:
            return False
        mediator = running()
        assert mediator is not None
        read = self.value._rows(self.host, self.site, raw, mediator)
        return not torch.equal(plain(self.view), read)


@dataclass
class Block:
    """What one running block holds, kept on its mediator.

    Attributes:
        held: copies handed out at the point where the model waits now.
        raw: what the model holds there.
        point: that point, (location, occurrence).
        passed: copies of earlier points with the version they had when the block moved on.
        step: the step of the run the block is at.
        last: the value read or written last, for messages.
        wrote: whether it changed anything the model computes with.
        asked: the point of the standard value asked for last.
    """

    held: list[_Held] = field(default_factory=list)
    raw: Any = None
    point: tuple[str, int] | None = None
    passed: list[tuple[weakref.ref[Private], int, str]] = field(default_factory=list)
    step: int = 0
    last: str | None = None
    wrote: bool = False
    asked: tuple[str, int] | None = None

    @staticmethod
    def of(mediator: Mediator) -> Block:
        """The block that ``mediator`` runs."""
        block: Block | None = mediator.__dict__.get("nnterp_block")
        if block is None:
            block = mediator.__dict__["nnterp_block"] = Block()
        return block

    def check_late_edits(self) -> None:
        """Raise if a copy was edited in place after the model had moved past its point."""
        alive = []
        for ref, version, label in self.passed:
            view = ref()
            if view is None:
                continue
            if view._version != version:
                self.passed = []
                raise OutOfOrder(
                    f"{label} was edited in place after the block had moved on"
                    f"{f' to {self.last}' if self.last and self.last != label else ''}, so the "
                    f"edit cannot reach the model. Edit it before the next value is read; if it "
                    f"is only a buffer of yours, clone() it first."
                )
            alive.append((ref, version, label))
        self.passed = alive

    def hand_back(self) -> Any:
        """The raw object with every edited copy put back, or ``KEEP``; the block moves on."""
        raw, result = self.raw, KEEP
        written: set[str] = set()
        held, self.held, self.point = self.held, [], None
        for entry in held:
            view, label = entry.view, entry.value.label(entry.host)
            self.passed.append((weakref.ref(view), view._version, label))
            edited = entry.edited(self.raw)
            if not (edited or view._served is not None):
                continue
            if entry.site.instead is not None:
                if edited:
                    raise Unavailable(f"{label} is read-only: {entry.site.instead}")
                continue
            if edited and label in written:
                raise ValueError(
                    f"two copies of {label} were edited in place; edit one of them, or assign"
                )
            if edited:
                entry.value.keeps_shape(entry.host, view, view._handed_shape)
                written.add(label)
                self.wrote = True
            # A copy, since the model may write into what it is given.
            new = entry.value.put(entry.host, entry.site, raw, clone(plain(view)))
            if new is not KEEP:
                raw = result = new
        self.raw = None
        return result

    def ahead(self, value: Value, host: Any) -> bool:
        """Whether a copy held here has to go back before ``value`` is read at this point too."""
        return any(
            entry.view.edited
            or (entry.view._served is not None and entry.value is value and entry.host is host)
            for entry in self.held
        )

    @property
    def waiting(self) -> bool:
        """Whether something has to go back before the block moves on."""
        return any(entry.view.edited or entry.view._served is not None for entry in self.held)


def running() -> Mediator | None:
    """The mediator whose block is running here, or ``None`` outside every block."""
    reference = getattr(getcurrent(), "mediator", None)
    return None if reference is None else reference()


Resolve: TypeAlias = "Site | str | Callable[[Any], Site | str]"


class Value(eproperty):
    """A standard value as an attribute of its host.

    Built from a :class:`Site`, from the reason why there is none, or from a function of the
    host that gives either. A note is what its documentation says of it on one engine.
    """

    def __init__(self, resolve: Resolve, note: str = "") -> None:
        super().__init__(key="value")
        self.resolve = resolve
        self.note = note

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        term = VOCABULARY[name]
        self.layout: Layout = term.layout
        self.description = f"{term.layout} {term.meaning}"
        self.__doc__ = self._documentation(term)

    def __reduce__(self) -> Any:
        # A family's class that its user wrote in a script travels to the engine with its values.
        return _again, (type(self), self.resolve, self.note, self.name)

    def _documentation(self, term: Term) -> str:
        parts = [f"{term.meaning[0].upper()}{term.meaning[1:]}: ``{term.layout}``."]
        if self.note:
            parts.append(self.note)
        if isinstance(self.resolve, str):
            return "\n\n".join([*parts, f"Raises:\n    Unavailable: {self.resolve}."])
        raises = [
            "Unavailable: this model or this step does not serve it, or it cannot be written.",
            "OutsideTrace: no forward is running.",
            "OutOfOrder: the model has run past it.",
        ]
        if term.writable:
            raises += [
                "WrongShape: it is written with another shape.",
                "TypeError: it is written with another dtype, or with no tensor.",
            ]
        return "\n\n".join([*parts, "Raises:\n    " + "\n    ".join(raises)])

    def __str__(self) -> str:
        return f"({self.name}): {self.description}"

    # -- what can be asked without a run --------------------------------------

    def site(self, host: Any) -> Site | str:
        """Where it is on ``host``, or why it is nowhere."""
        sites: dict[str, Site | str] = host.__dict__.setdefault("_sites", {})
        name = self.name
        assert name is not None
        if name not in sites:
            resolve = self.resolve
            try:
                found = resolve if isinstance(resolve, (Site, str)) else resolve(host)
            except Unavailable as reason:
                found = str(reason)
            if isinstance(found, Site):
                try:
                    found.at(host)
                except AttributeError as missing:
                    found = f"its family says that it is at a module that is not there: {missing}"
            sites[name] = found
        return sites[name]

    def reason(self, host: Any, step: Step = "prefill") -> str | None:
        """Why ``host`` does not serve it on such a step, or ``None``."""
        site = self.site(host)
        if isinstance(site, str):
            return site
        return site.decode if step == "decode" else None

    def read_only(self, host: Any) -> str | None:
        """Why it cannot be written on ``host``, or ``None`` where it can."""
        site = self.site(host)
        return site if isinstance(site, str) else site.instead

    def label(self, host: Any) -> str:
        """Its key, for messages: ``layers.2.self_attn.attention_output``."""
        return f"{host.label}.{self.name}" if host.label else str(self.name)

    def _location(self, obj: Any) -> str:
        site = self.site(obj)
        if isinstance(site, str):
            raise self._unavailable(obj, site)
        return site.at(obj)

    def _unavailable(self, host: Any, reason: str) -> Unavailable:
        return Unavailable(f"{self.label(host)} is unavailable on {host.model_name}: {reason}")

    # -- reading and writing --------------------------------------------------

    def __get__(self, obj: Any, owner: Any = None) -> Any:
        if obj is None:
            return self
        try:
            return self._read(obj)
        except AttributeError as error:
            # Python drops it and asks __getattr__, which raises this very object again.
            obj.__dict__["_raised"] = (self.name, error)
            raise

    def _read(self, host: Any) -> Any:
        site, mediator, block, point = self._arrive(host)
        raw = self._raw(site, host, mediator, block, point)
        value = self._rows(host, site, raw, mediator)
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value  # a scan's tensors hold nothing that a copy could keep
        view = Private.of(value)
        block.held.append(_Held(self, host, site, view))
        block.raw, block.point = raw, point
        mediator.transform = WriteBack(block.hand_back, view, self, *point)
        return view

    def __set__(self, obj: Any, value: Any) -> None:
        site, mediator, block, point = self._arrive(obj)
        if site.instead is not None:
            raise Unavailable(f"{self.label(obj)} is read-only: {site.instead}")
        # `x.value += y` edits the copy and then assigns it: one write, not two.
        block.held = [entry for entry in block.held if entry.view is not value]
        raw = self._raw(site, obj, mediator, block, point)
        new = self._checked(obj, value, self._rows(obj, site, raw, mediator))
        swapped = self.put(obj, site, raw, new)
        block.wrote = True
        block.hand_back()
        mediator.transform = None
        if swapped is not KEEP:
            Mediator.swap(point[0], swapped)

    def _arrive(self, host: Any) -> tuple[Site, Mediator, Block, tuple[str, int]]:
        """Everything that can be refused before waiting for the model."""
        site = self.site(host)
        if isinstance(site, str):
            raise self._unavailable(host, site)
        mediator = running()
        if mediator is None:
            raise OutsideTrace(
                f"{self.label(host)} exists while the model runs: read it in a "
                f"`with model.trace(prompt)`, `model.prefill(prompt)` or "
                f"`model.decode(prompt, ...)` block, or in one of its `tracer.invoke(prompt)`"
            )
        block = Block.of(mediator)
        block.check_late_edits()
        location = site.at(host)
        if site.prepare is not None:
            site.prepare(host)
            # A place that is served from now on was passed, uncounted, by every step before.
            counts = mediator.interleaver.counts
            passed = mediator.occurrence(f"{host.path}.output") - mediator.occurrence(location)
            if passed > 0:
                counts[location] = counts.get(location, 0) + passed
        occurrence = mediator.wanted(location)
        seen = mediator.occurrence(location)
        if mediator.iteration is not None:
            block.step = mediator.iteration
        elif mediator.pending is not None:
            # The read that took the pin off may have been nnsight's own.
            block.step = max(block.step, mediator.pending.iteration or 0)
        label = self.label(host)
        # A relaxed request would wait for the next step's visit and shift every list by one.
        missed = occurrence < seen or (mediator.iteration is None and occurrence > block.step)
        if missed:
            raise OutOfOrder(
                f"{label} was asked for after the model had run past it"
                f"{f', at {block.last}' if block.last else ''}: values are read in the order of "
                f"the forward, so ask for {label} first (or, for a step that is over, in that "
                f"step)."
            )
        if occurrence > 0 and site.decode is not None:
            raise self._unavailable(host, site.decode)
        block.last, block.asked = label, (location, occurrence)
        return site, mediator, block, block.asked

    def _raw(
        self, site: Site, host: Any, mediator: Mediator, block: Block, point: tuple[str, int]
    ) -> Any:
        if block.point == point and not block.ahead(self, host):
            return block.raw
        if block.held and not block.waiting:
            block.hand_back()
            mediator.transform = None
        return Mediator.value(point[0])

    def _rows(self, host: Any, site: Site, raw: Any, mediator: Mediator) -> Any:
        value = site.lens.get(raw, host)
        if not isinstance(value, Tensor):
            return value
        rows = host.root.own_rows(mediator, self.layout, value)
        return value if rows is None else value[rows]

    def put(self, host: Any, site: Site, raw: Any, new: Tensor) -> Any:
        """``raw`` with the block's own rows of the value replaced by ``new``."""
        mediator = running()
        assert mediator is not None
        if self.name == "input_ids":
            limit = host.root.vocab_size
            if bool(((new < 0) | (new >= limit)).any()):
                # The embedding would fail on it, for everybody in the batch.
                raise ValueError(f"input_ids are token ids below {limit}; this write has another")
        if new.requires_grad and not torch.is_grad_enabled():
            new = new.detach()
        whole = site.lens.get(raw, host)
        rows = host.root.own_rows(mediator, self.layout, whole)
        if rows is not None:
            widened = whole.clone()
            widened[rows] = new
            new = widened
        return site.lens.put(raw, new, host)

    def keeps_shape(self, host: Any, new: Tensor, shape: torch.Size) -> None:
        """Raise ``WrongShape`` unless a write has the value's shape."""
        if new.shape != shape:
            raise WrongShape(
                f"{self.label(host)} is {self.layout} = {tuple(shape)}; a write keeps the shape, "
                f"this one has {tuple(new.shape)}"
            )

    def _checked(self, host: Any, value: Any, old: Tensor) -> Tensor:
        label = self.label(host)
        if not isinstance(value, Tensor):
            raise TypeError(f"{label} takes a tensor, not {type(value).__name__}")
        self.keeps_shape(host, value, old.shape)
        if value.dtype != old.dtype:
            raise TypeError(f"{label} is {old.dtype}, not {value.dtype}; convert with .to(...)")
        if value.device.type == "cpu":
            value = value.to(old.device)  # where vLLM leaves what an earlier trace saved
        if value.device != old.device:
            raise ValueError(f"{label} is on {old.device}, not {value.device}; move it with .to")
        # A copy, since kernels write into what they are given.
        return clone(plain(value))


def value(resolve: Resolve, note: str = "") -> Any:
    """Serve the standard value of the attribute's name at a site; ``note`` is documentation."""
    return Value(resolve, note)


def unavailable(reason: str) -> Any:
    """Refuse the standard value of the attribute's name, saying why and what to do instead."""
    return Value(reason)


def _again(kind: type[Value], resolve: Resolve, note: str, name: str) -> Value:
    found = kind(resolve, note)
    found.__set_name__(Value, name)
    return found


def operations(function: Any) -> tuple[str, ...]:
    """The names of a function's operations; none where its source cannot be read."""
    function = getattr(function, "__func__", function)
    try:
        names: tuple[str, ...] = compiled(decorator_chain(function)[0]).names
    except SourceNotAvailable:
        return ()
    return names


def opened(host: Any) -> None:
    """Serve the operations of a module's forward, from its next call on.

    Raises:
        OutOfOrder: the model is in there now, so that this call's will not be served.
    """
    mediator, state = running(), host._module.__dict__.get(STATE)
    if mediator is not None and (state is None or not state.sourced):
        entered, left = (mediator.occurrence(f"{host.path}.{side}") for side in ("input", "output"))
        if entered > left:
            raise OutOfOrder(
                f"the model is inside {host.path} already, whose operations were not asked for "
                f"before: read a standard value of it before what lies under it"
            )
    install_source(host)
