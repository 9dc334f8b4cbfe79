"""A plan with everything that people do with one. It knows every room of this floor, and none of them knows it.

The data, its checks and its file: :class:`partitioner.record.data.PlanData`, which is what the rooms take.
"""

from __future__ import annotations

import shlex
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from cost_models.shown import as_html
from partitioner.record.data import PlanData
from partitioner.record.file import write_text
from partitioner.report.diff import diff_plans
from partitioner.report.launch import launch_of
from partitioner.report.table import render_plan, summary_rows
from partitioner.unforeseen import versions_named

if TYPE_CHECKING:
    from partitioner.engine.engine import Engine
    from partitioner.explain.explanation import Explanation
    from partitioner.explain.rank_graph import RankGraph
    from partitioner.models.as_graph import ModelOrTrace
    from partitioner.report.profile import Profile
    from partitioner.verify.report import TrainReport, VerifyReport
    from runtime.simulate.simulation import Simulation


class Plan(PlanData):
    """A partitioning plan. Made by :func:`partitioner.partition`, or loaded from a file."""

    def __str__(self) -> str:
        return render_plan(self)

    def _repr_html_(self) -> str:
        return as_html(str(self), summary_rows(self))

    def launch_command(self, model: str = "MODEL", plan_file: str = "plan.json", steps: int = 10) -> str:
        """Return the torchrun command(s) that run the plan: one line per node."""
        run = f"-m partitioner run {shlex.quote(plan_file)} {shlex.quote(model)} --steps {steps}"
        return launch_of(self, run)

    def diff(self, other: PlanData) -> str:
        """Describe what differs between two plans; "" if nothing does."""
        return diff_plans(self, other)

    def report(
        self, path: str | PathLike[str], *, beside: PlanData | None = None, profile: Profile | None = None
    ) -> None:
        """Write the plan as one HTML file with pictures: placement graph, timeline, memory, traffic, what if.

        The file needs nothing else, no network either. ``beside``: another plan to show next to this one. ``profile``: what
        ``engine.profile()`` returned for this plan, to be laid under the prediction.
        """
        from partitioner.pictures.data import report_data
        from partitioner.pictures.page import render_page

        plans = (self,) if beside is None else (self, beside)
        write_text(
            Path(path),
            render_page(report_data(plans, measured=None if profile is None else profile.measured)),
        )

    def figure(
        self, kind: Literal["timeline", "memory", "placement"], path: str | PathLike[str] | None = None
    ) -> str:
        """Return a still figure as SVG, for papers and slides; write it to ``path`` (.svg, .png) if one is given.

        ``kind``: the step's timeline, memory over the step, or the placement graph. PNG needs the package cairosvg.
        """
        from partitioner.pictures.figures import figure

        return figure(self, kind, path)

    def simulate(self) -> Simulation:
        """Rebuild the plan's programs, prove them again, and simulate one training step. Needs no model."""
        from partitioner.record.rebuild import simulate_plan

        return simulate_plan(self)

    @overload
    def verify(self, model: ModelOrTrace, *, train: Literal[False] = ..., **options: Any) -> VerifyReport: ...

    @overload
    def verify(self, model: ModelOrTrace, *, train: Literal[True], **options: Any) -> TrainReport: ...

    @versions_named()
    def verify(
        self, model: ModelOrTrace, *, train: bool = False, **options: Any
    ) -> VerifyReport | TrainReport:
        """Run the actual plan on local Gloo processes and compare every number with the unpartitioned model.

        ``train``: deploy it there instead and train a few steps as a script would (loader, clipping, scheduler, save,
        resume, resume under another plan, the plan's precision), beside a plain loop over the model.
        Example inputs, loss and open sizes are those that the plan was made with, if that was in this process.
        """
        from partitioner.verify.train import verify_training
        from partitioner.verify.verify import verify_plan

        completed = self._made_with.completed(model, options)
        return verify_training(self, model, **completed) if train else verify_plan(self, model, **completed)

    @versions_named()
    def deploy(self, model: ModelOrTrace, **options: Any) -> Engine:
        """Return this rank's engine, ready for ``train_step``; under torchrun, called on every rank.

        Example inputs, loss and open sizes are those that the plan was made with, if that was in this process.
        """
        from partitioner.deployment.deploy import deploy_plan

        return deploy_plan(self, model, **self._made_with.completed(model, options))

    def explain(self, name: str, model: ModelOrTrace | None = None, **options: Any) -> Explanation:
        """Explain what else an op, a parameter or an input could have been, at which cost, and why it is as it is.

        ``name``: as ``partitioner graph`` and ``model.named_parameters()`` have it. ``model``: the plan's model, which is
        traced again, for a plan from a file. ``options``: example_inputs, loss_fn, batch_dims and dynamic_dims of
        :func:`partition`.
        """
        from partitioner.explain.explain import explain_plan

        return explain_plan(self, name, model, options)

    def graph(self, model: ModelOrTrace | None = None, *, rank: int = 0, **options: Any) -> RankGraph:
        """Return what ``rank`` runs, op by op, with its bridges to other devices by name; ``print`` shows it.

        ``model``, ``options``: as for ``explain``.
        """
        from partitioner.explain.rank_graph import rank_graph

        return rank_graph(self, model, rank, options)
