"""The pytest plugin behind the conformance tests: what they run on, in which process and order.

It brings in torch where a test is run: pytest-xdist's controller, which runs none, does without.

A conftest registers it with its engines::

    def pytest_configure(config):
        install(config, [MyEngine()])

and a test module beside it imports the tests::

    from nnterp.core.testing.conformance import *

All of them, as they are: a module that has some of the tests and not the others is refused. None
may be skipped: that fails. A test that nothing here is a subject of, as the one of mixtures where
no checkpoint has one, is taken out, and the report names it.

``--conformance-report FILE`` writes what a run found as JSON, if the conftest at the root declares
the option with :func:`nnterp.core.testing.option.add_option`. Errors have two digits and the order
is always the same, so that a report that is kept shows its changes line by line::

    format      1, the version of this layout
    versions    of python, of the packages, and of each engine by its label under "engines"
    platform    "Linux x86_64"
    suite       the outcomes of the tests of no subject, as a subject's "tests"
    idle        the tests that no checkpoint and engine here is a subject of
    subjects    by label, "gemma2-vllm", those of which a test ran:
      engine      the adapter's label
      checkpoint  the recipe's name
      model_type  transformers' name of the architecture
      family      the module of the family, null where it is none or no model was loaded
      faults      the known faults that the subject has: name, version, cause, value, size, patch
      missing     null, or version and cause of a checkpoint that the engine cannot load
      tests       passed and failed, how many; failed_ids, of pytest, sorted
      departs     null, or the first value of the forward that departs from the reference, of those
                  that were measured: value (its key), error, where
      values      by key within its block, "mlp.mlp_output", in the order of the vocabulary:
        status      "served", "unavailable", or "partly" where blocks differ
        reason      why not; not there where all is served
        layers      the blocks that serve it; only there where it is served partly
        decode      why it is not served on decode steps; not there where it is
        writable    whether it can be written; null if no test of this run tried
        error       the largest error of a row as it was read, of its magnitude, against the
                    reference with the patch of the known fault; null if no test measured it; the
                    text "inf" if no number says it: another shape, or it cannot be read
        where       the block and the prompt of that error; null if there is none
        bound       how large it may be
"""

from __future__ import annotations

import atexit
import gc
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from nnterp.core import VOCABULARY
from nnterp.core._vocabulary import MIXTURE
from nnterp.core.faults import Missing
from nnterp.core.testing.adapters import Adapter, Subject, subjects
from nnterp.core.testing.faults import Fault, Known
from nnterp.core.testing.recipes import RECIPES, Recipe
from nnterp.core.testing.report import Facts, Findings, Worst, facts, option

if TYPE_CHECKING:
    from nnterp.core.testing.bench import Bench
    from nnterp.core.testing.references import References

# The kit's asserts tell what they compared; pytest warns of what this comes too late for.
_MODULES = [
    f"nnterp.core.testing.{name}" for name in ("bench", "cases", "conformance", "tolerance")
]
pytest.register_assert_rewrite(*(name for name in _MODULES if name not in sys.modules))

NOTHING_KNOWN = Known()

# What a test tells of itself, in the properties of its report, which pytest-xdist carries along.
_TESTED, _WORST, _FACTS = "nnterp-tested", "nnterp-worst", "nnterp-facts"
_IDLE = "nnterp-idle"


class Plugin:
    """What the tests of :mod:`nnterp.core.testing.conformance` run on.

    A model is loaded once, for all its tests in a row, and closed before the next one. Subjects of
    one model type share a process and run engine after engine, the first engine first: the others
    are compared with it; with pytest-xdist, :func:`scheduler` sees to that. :func:`install` says
    what the arguments are; ``report`` is the file that the report goes to.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        *,
        recipes: Sequence[Recipe] = tuple(RECIPES.values()),
        known: Known = NOTHING_KNOWN,
        report: Path | None = None,
    ) -> None:
        self.adapters = list(adapters)
        self.recipes = list(recipes)
        self.known = known
        self.subjects = subjects(adapters, recipes)
        # What the first engine served, for the others to be compared with.
        self.peers: dict[str, Bench] = {}
        self._prepared: set[str] = set()
        self.worst: dict[str, Worst] = {}
        # Tests that nothing here is a subject of, by their id without parameters.
        self.idle: dict[str, str] = {}
        self.report = report
        self.findings = Findings()
        self._told: set[Bench] = set()

    # -- collection --------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        wanted = metafunc.fixturenames
        if "missing" in wanted:
            lacking = [one for one in self.subjects if self.known.lacks(one) is not None]
            self._parametrize(metafunc, "missing", lacking, "function")
        if "bench" not in wanted:
            return
        chosen = [one for one in self.subjects if self.known.lacks(one) is None]
        for marker in metafunc.definition.iter_markers("checkpoints"):
            chosen = [one for one in chosen if one.sparse is marker.kwargs["sparse"]]
        if "fault" in wanted:
            chosen = [one for one in chosen if self.known.fault(one) is not None]
        if "peer" in wanted:
            # Where one of the two has a known fault they differ by it.
            chosen = [
                one
                for one in chosen
                if (other := self.peer_of(one)) is not None
                and self.known.fault(one) is self.known.fault(other) is None
            ]
        if "name" not in wanted:
            self._parametrize(metafunc, "bench", chosen, "session")
            return
        values = metafunc.definition.get_closest_marker("values")
        pairs = {
            f"{name}-{one.label}": (name, one)
            for name in (VOCABULARY if values is None else values.args)
            for one in chosen
            # What a dense model has not is the subject of one test of its own.
            if one.sparse or name not in MIXTURE
        }
        ids = _asked_for(metafunc, pairs)
        metafunc.parametrize(
            "name, bench",
            [pairs[one] for one in ids],
            indirect=["bench"],
            ids=ids,
            scope="session",
        )

    def _parametrize(
        self,
        metafunc: pytest.Metafunc,
        name: str,
        chosen: Sequence[Subject],
        scope: Literal["function", "session"],
    ) -> None:
        if not chosen:
            # pytest makes a skipped test of it, which is taken out again and named in the report.
            self.idle[metafunc.definition.nodeid] = metafunc.definition.name
        labels = {one.label: one for one in chosen}
        ids = _asked_for(metafunc, labels)
        values = [labels[one] for one in ids]
        metafunc.parametrize(name, values, indirect=True, ids=ids, scope=scope)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        self.idle.clear()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Group after group, engine after engine within it; the rest stays where it was."""
        _check_complete(items)
        idle = [item for item in items if item.nodeid.partition("[")[0] in self.idle]
        if idle:
            config.hook.pytest_deselected(items=idle)
            items[:] = [item for item in items if item not in idle]
        places = [i for i, item in enumerate(items) if _subject(item) is not None]
        ours = [(subject, items[i]) for i in places if (subject := _subject(items[i])) is not None]
        groups = list(dict.fromkeys(subject.group for subject, _ in ours))
        rank = {one: i for i, one in enumerate(self.subjects)}
        ours.sort(key=lambda pair: (groups.index(pair[0].group), rank.get(pair[0], len(rank))))
        for place, (_, item) in zip(places, ours, strict=True):
            items[place] = item

    def peer_of(self, subject: Subject) -> Subject | None:
        """The subject of the same checkpoint on the first engine, for the others."""
        for other in self.subjects:
            if other.recipe is subject.recipe and self.known.lacks(other) is None:
                return None if other is subject else other
        return None

    # -- what a test is given ----------------------------------------------------

    @contextmanager
    def opened(self, subject: Subject, selected: Sequence[Subject | None]) -> Iterator[Bench]:
        """The subject's model, loaded, beside the oracle's answers; closed at the end."""
        self._prepare(subject.group, selected)
        bench = self._loaded(subject)
        try:
            if self.peer_of(subject) is None:
                self.peers[subject.recipe.name] = bench
            yield bench
        finally:
            model, bench.model = bench.model, None
            subject.adapter.close(model)
            del model

    def _loaded(self, subject: Subject) -> Bench:
        from nnterp.core.testing.bench import Bench
        from nnterp.core.testing.checkpoints import build

        model = subject.adapter.load(build(subject.recipe))
        return Bench(subject, model, self.answers(subject, self._patch(subject)))

    def answers(self, subject: Subject, patch: str | None = None) -> References:
        """What plain transformers computes for a subject, with a patch of the oracle."""
        from nnterp.core.testing.checkpoints import build
        from nnterp.core.testing.references import references

        return references(build(subject.recipe), subject.recipe, patch)

    def _patch(self, subject: Subject) -> str | None:
        fault = self.known.fault(subject)
        return None if fault is None else fault.patch

    def _prepare(self, group: str, selected: Sequence[Subject | None]) -> None:
        """Everything of a group that needs transformers' own classes, before any engine runs.

        An engine may change them for the rest of the process, as vLLM does.
        """
        from nnterp.core.testing.checkpoints import build
        from nnterp.core.testing.references import prepared

        if group in self._prepared:
            return
        self._prepared.add(group)
        # What was imported stays: the collector need not go through it with every model.
        gc.collect()
        gc.freeze()
        chosen = {one: None for one in selected if one is not None and one.group == group}
        for subject in chosen:
            path = build(subject.recipe)
            for patch in {None, self._patch(subject)}:
                prepared(path, subject.recipe, patch)
        for subject in chosen:
            peer = self.peer_of(subject)
            if peer is not None and peer not in chosen and subject.recipe.name not in self.peers:
                self.peers[subject.recipe.name] = self._read_peer(peer)

    def _read_peer(self, subject: Subject) -> Bench:
        from nnterp.core.testing.cases import PROMPTS

        bench = self._loaded(subject)
        for prompt in PROMPTS:
            bench.prefill(prompt)
        bench.decode("five")
        model, bench.model = bench.model, None
        subject.adapter.close(model)
        return bench

    # -- report ------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if _is_ours(item):
            subject = _subject(item)
            item.user_properties.append((_TESTED, None if subject is None else subject.label))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield
        bench: Bench | None = getattr(item, "funcargs", {}).get("bench")
        if _is_ours(item) and bench is not None:
            label = bench.subject.label
            for worst in bench.worst.values():
                entry = (label, worst.error, worst.allowed, worst.where)
                item.user_properties.append((_WORST, entry))
            bench.worst = {}
            first = bench not in self._told
            self._told.add(bench)
            item.user_properties.append((_FACTS, (label, facts(bench, first))))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and _is_ours(item):
            report.outcome = "failed"
            report.longrepr = f"a conformance test is not skipped: {report.longrepr}"
        if report.failed and _is_ours(item):
            means = inspect.getdoc(cast("pytest.Function", item).function) or ""
            report.sections.append(("what this failure means", means))
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # What is left of engines goes now; whoever collects at the end has little to go through.
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # The interpreter ends as usual.
        # Under pytest-xdist every worker has a plugin too, and hands its part to the controller's.
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_IDLE] = dict(self.idle)
        elif self.report is not None:
            self.findings.write(self.report, self.subjects, self.known, self.idle.values())

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist's has ended; one that crashed left nothing."""
        self.idle |= getattr(node, "workeroutput", {}).get(_IDLE, {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        if _TESTED in told:
            label = cast("str | None", told[_TESTED])
            self.findings.outcome(report.nodeid, label, report.when, report.outcome)
        if report.when != "call":
            return
        for key, entry in report.user_properties:
            if key == _WORST:
                label, error, allowed, where = cast("tuple[str, float, float, str]", entry)
                worst = Worst(error, allowed, where)
                if label not in self.worst or worst.share > self.worst[label].share:
                    self.worst[label] = worst
            elif key == _FACTS:
                self.findings.add(*cast("tuple[str, Facts]", entry))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        departing = {
            one.label: found
            for one in self.subjects
            if (found := self.findings.departure(one.label)) is not None
        }
        if departing:
            terminalreporter.section("the first value of the forward that departs")
            for label, (_, error, where) in departing.items():
                terminalreporter.write_line(f"{label}: {where}, by {error:.1e}: look there first")
        if not self.worst:
            return
        terminalreporter.section("worst row of a checkpoint on an engine, of what is allowed")
        ranking = sorted(self.worst.items(), key=lambda pair: -pair[1].share)
        for label, worst in ranking[:10]:
            terminalreporter.write_line(
                f"{worst.error:9.1e} of {worst.allowed:.0e}  {label}: {worst.where}"
            )


def group_of(test: str) -> str:
    """What runs in one process: the subjects of one model type, or else a file's tests."""
    recipe = _recipe_of(test)
    return test.partition("::")[0] if recipe is None else recipe.model_type


def _recipe_of(test: str) -> Recipe | None:
    _, _, parameters = test.partition("::")[2].partition("[")
    parts = parameters.rstrip("]").split("-")
    return next((RECIPES[part] for part in parts if part in RECIPES), None)


def scopes_of(tests: Sequence[str], workers: int) -> dict[str, str]:
    """What runs in one process, for each test: its group, or a part of it.

    Where there are fewer groups than workers, the checkpoints of a model type are divided among
    the workers, each of which still runs its own engine after engine.
    """
    groups = {test: group_of(test) for test in tests}
    if len(set(groups.values())) >= workers:
        return groups
    places: dict[str, dict[Recipe, int]] = defaultdict(dict)
    for test, group in groups.items():
        if (recipe := _recipe_of(test)) is not None:
            place = places[group].setdefault(recipe, len(places[group]))
            groups[test] = f"{group} {place % workers}"
    return groups


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler that keeps together what :func:`scopes_of` does.

    For a ``pytest_xdist_make_scheduler`` of the conftest at the root of the tests. xdist's own
    ``loadgroup`` puts the group into a test's id, which pytest 9.2 does not let it do any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        """Groups by model type."""

        scopes: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.scopes is None:
                self.scopes = scopes_of(self.collection, self.numnodes)
            return self.scopes[nodeid]

    return Grouped(config, log)


def _subject(item: Any) -> Subject | None:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    subject = parameters.get("bench", parameters.get("missing"))
    return subject if isinstance(subject, Subject) else None


def _asked_for(metafunc: pytest.Metafunc, labels: Iterable[str]) -> list[str]:
    """The parameters of which ``-k`` may select a test; pytest decides.

    The ten thousand tests that it does not select would take longer than those that it does.
    """
    words = set(re.findall(r"[^\s()]+", metafunc.config.getoption("keyword").lower()))
    parts, ids = words - {"and", "or"}, list(labels)
    others = [str(word).lower() for word in metafunc.definition.keywords]
    if (
        not parts
        or "not" in words
        or next(metafunc.definition.iter_markers("parametrize"), None) is not None
        or any(word in other for word in parts for other in others)
    ):
        return ids
    test = metafunc.definition.name
    asked = [one for one in ids if any(word in f"{test}[{one}]".lower() for word in parts)]
    # One is left for pytest to leave out, which makes a test of none at all.
    return asked or ids[:1]


def _is_ours(item: Any) -> bool:
    return _subject(item) is not None or "suite" in getattr(item, "fixturenames", ())


def _check_complete(items: Sequence[Any]) -> None:
    """Refuse a module that runs some tests of the kit and not all, or others of their names."""
    from nnterp.core.testing import conformance

    tests = {name: test for name, test in vars(conformance).items() if name.startswith("test_")}
    modules = {item.module: None for item in items if getattr(item, "module", None) is not None}
    for module in modules:
        found = vars(module)
        lacking = [name for name, test in tests.items() if found.get(name) is not test]
        if module is not conformance and len(lacking) < len(tests) and lacking:
            raise pytest.UsageError(
                f"{module.__name__} has tests of the conformance kit, and not all of them as they "
                f"are there: {', '.join(lacking)}"
            )


_STASH = pytest.StashKey[Plugin]()


def install(
    config: pytest.Config,
    adapters: Sequence[Adapter],
    *,
    recipes: Sequence[Recipe] = tuple(RECIPES.values()),
    known: Known = NOTHING_KNOWN,
) -> Plugin:
    """Have the conformance tests run on these engines; for a conftest's ``pytest_configure``.

    Args:
        config: pytest's.
        adapters: the engines, the one that the others are compared with first.
        recipes: the checkpoints.
        known: their known faults, and what they cannot load.
    """
    config.addinivalue_line(
        "markers",
        "checkpoints(sparse=...): a conformance test of checkpoints with a mixture, or without",
    )
    config.addinivalue_line(
        "markers", "values(name, ...): a conformance test of these values; of all without it"
    )
    plugin = Plugin(adapters, recipes=recipes, known=known, report=option(config))
    config.stash[_STASH] = plugin
    config.pluginmanager.register(plugin, "nnterp-conformance")
    config.pluginmanager.register(sys.modules[__name__], "nnterp-conformance-fixtures")
    return plugin


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A checkpoint on an engine, loaded, beside the oracle's answers."""
    selected = [_subject(item) for item in request.session.items]
    with request.config.stash[_STASH].opened(request.param, selected) as opened:
        yield opened


@pytest.fixture
def peer(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """What the first engine serves for the same checkpoint."""
    return request.config.stash[_STASH].peers[bench.subject.recipe.name]


@pytest.fixture
def fault(request: pytest.FixtureRequest, bench: Bench) -> Fault:
    """The known fault of the subject."""
    found = request.config.stash[_STASH].known.fault(bench.subject)
    assert found is not None
    return found


@pytest.fixture
def unpatched(request: pytest.FixtureRequest, bench: Bench) -> References:
    """What plain transformers computes for the checkpoint."""
    return request.config.stash[_STASH].answers(bench.subject)


@pytest.fixture
def missing(request: pytest.FixtureRequest) -> tuple[Subject, Missing]:
    """A subject that cannot be loaded, and why."""
    found = request.config.stash[_STASH].known.lacks(request.param)
    assert found is not None
    return request.param, found


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Plugin:
    """All that is tested here: engines, subjects, what is known of them."""
    return request.config.stash[_STASH]
