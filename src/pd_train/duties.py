"""What a worker does for its run once it has met the others: it trains its stage, or emulates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from pd_format.layers.task import get_task
from pd_train.assembly import assemble, choose_device
from pd_train.built import build_stage
from pd_train.checkpoint.continuing import go_on, open_keeper
from pd_train.checkpoint.progress import RunProgress
from pd_train.compute import StageRunner
from pd_train.control import Launcher, WorkerSetup
from pd_train.debug_dump import WorkerDump
from pd_train.emulated import EmulatedMinibatches
from pd_train.emulated_assembly import assemble_emulated
from pd_train.emulation import Emulation
from pd_train.events import Event, Note
from pd_train.feed import loader_processes, open_data
from pd_train.following import follow, part_with
from pd_train.forms import plan_problem
from pd_train.inbox import Inbox
from pd_train.lead import Lead
from pd_train.links import Links
from pd_train.loader_process import prepare_processes
from pd_train.reading import open_source
from pd_train.recorder import Recorder
from pd_train.routing import Place
from pd_train.staging import Staging, open_staging
from pd_train.transport import Transport
from pd_train.watch import Watch, report_to_rank_0
from pd_train.wire import Message

__all__ = ["Company", "Duty", "Emulating", "Stands", "Training"]


class Company(NamedTuple):
    """The other workers, once all have met."""

    transport: Transport
    inbox: Inbox
    links: Links
    mark: str
    """Of this start of the run."""
    clock_errors: Mapping[int, float]
    """Seconds by which workers' clocks may be off, by rank."""
    tell: Callable[[Event], None]
    """Rank 0's way to everyone who watches."""


class Stands(Protocol):
    """What can say where it stands."""

    def standing(self) -> list[str]:
        """For people; may be called from any thread."""
        ...


class Duty(Protocol):
    """Its constructor does what needs nobody else, and may take long."""

    fingerprint: str
    """Of the model."""

    @property
    def problem(self) -> Callable[[Message], str | None]:
        """Says what is wrong with a message by the plan; None where nothing is."""
        ...

    @property
    def staging(self) -> Staging | None:
        """The way to the device and back; None where nothing is on one."""
        ...

    def assemble(self, links: Links, recorder: Recorder) -> Stands:
        """Put the stage together; called once, before the workers meet."""
        ...

    def run(self, company: Company) -> None:
        """All segments of the run, to its end."""
        ...

    def close(self) -> None:
        """End what was started; closing twice does no harm."""
        ...


class Training:
    """The stage is built from the model, and reads data where it is the first."""

    def __init__(self, setup: WorkerSetup, place: Place, launcher: Launcher, dump: WorkerDump) -> None:
        options = setup.options
        self.problem = partial(plan_problem, options.plan, place)
        self._setup = setup
        self._place = place
        self._dump = dump
        self._device = choose_device(options.device, setup.local_index)
        processes = loader_processes(options)
        if place.before is None and processes:
            prepare_processes(options.data)
        # A run that goes on takes its weights from the checkpoint; the file that it began with may be gone.
        init_from = None if options.resume == "yes" else options.init_from
        dump.phase = "builds its stage"
        self._built = build_stage(options.plan, place.stage.index, options.seed, self._device, init_from)
        self.fingerprint = self._built.fingerprint
        self.staging = open_staging(self._device)
        self._task = get_task(options.plan.task)
        dump.phase = "opens the data"
        self._loaders, self._measure, self._source = None, None, None
        if place.before is None:
            self._loaders, self._measure = open_data(options, self._built, self._task)
            pin = self._device.type == "cuda"
            self._source = open_source(
                options, place, self._loaders, processes, pin, lambda text: launcher.tell_event(Note(text))
            )

    def assemble(self, links: Links, recorder: Recorder) -> StageRunner:
        self._assembled = assemble(
            self._setup.options, self._built, links, self._source, self._device, self._task, recorder, self.staging
        )
        return self._assembled.runner

    def run(self, company: Company) -> None:
        setup, options, built, assembled = self._setup, self._setup.options, self._built, self._assembled
        transport, inbox, links = company.transport, company.inbox, company.links

        def state() -> dict[str, Tensor]:
            return {**(built.unused if setup.rank == 0 else {}), **built.state(assembled.sets.newest())}

        keeper = None if options.evaluate_only else open_keeper(setup, company.mark, links, state, assembled)
        progress = RunProgress()
        if options.resume != "no":
            self._dump.phase = "agrees with the others on a checkpoint to go on from"
            progress = go_on(setup, built, links, assembled)
        self._dump.phase = "runs"
        if self._loaders is None or setup.rank:
            report_to_rank_0(assembled.runner, links)
            follow(transport, inbox, assembled.runner, keeper)
            is_asked = self._place.replica == 0 and not options.evaluate_only
            part_with(transport, inbox, state() if is_asked else {}, assembled.runner.statistics())
            return
        watch = Watch(options, assembled.runner, inbox, company.clock_errors, company.tell, device=self._device.type)
        lead = Lead(
            options,
            assembled.runner,
            transport,
            inbox,
            loaders=self._loaders,
            loss_scale=assembled.loss_scale,
            device=self._device.type,
            tell=company.tell,
            measure=self._measure,
            keeper=keeper,
            watch=watch,
        )
        if options.evaluate_only:
            lead.evaluate()
        else:
            lead.run(state, built.state_names, progress)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class Emulating:
    """The stage is made of a profile; nothing is built or read."""

    staging = None

    def __init__(self, setup: WorkerSetup, place: Place, emulation: Emulation, dump: WorkerDump) -> None:
        # What it sends has the sizes of compressed values, and no other form.
        plain = setup.options.plan.model_copy(update={"compress_activations": None})
        self.problem = partial(plan_problem, plain, place)
        self._setup = setup
        self._emulation = emulation
        self._dump = dump
        self.fingerprint = setup.options.plan.model.fingerprint

    def assemble(self, links: Links, recorder: Recorder) -> StageRunner:
        self._stage = assemble_emulated(self._setup.options, self._emulation, links, recorder)
        return self._stage.runner

    def run(self, company: Company) -> None:
        options, runner = self._setup.options, self._stage.runner
        self._dump.phase = "runs"
        if self._setup.rank:
            report_to_rank_0(runner, company.links)
            follow(company.transport, company.inbox, runner, None)
            part_with(company.transport, company.inbox, {}, runner.statistics())
            return
        assert options.minibatches is not None
        count = EmulatedMinibatches(options.minibatches, options.plan.minibatch_size)
        watch = Watch(options, runner, company.inbox, company.clock_errors, company.tell, device=None)
        lead = Lead(
            options,
            runner,
            company.transport,
            company.inbox,
            loaders=(count, count),
            loss_scale=None,
            device=None,
            tell=company.tell,
            measure=None,
            keeper=None,
            watch=watch,
        )
        lead.emulate(self._emulation, self._stage.engine.ends)

    def close(self) -> None:
        pass
