"""``make demo``: plan GPT-2 on two local workers, look at the plan, verify it, train with it.

python -m examples.demo [--steps 20]
"""

from __future__ import annotations

import argparse
import time

from cost_models.files import calibration_path
from cost_models.measure.run import calibrate_workers
from cost_models.measure.shown import render_calibration
from cost_models.measure.stored import stored_calibration
from examples.byte_text import batches, gpt
from partitioner import ClusterSpec, Plan, partition
from passes.costs.cases import count_case
from runtime.measure.collectives import measure_collectives
from runtime.ranks.launch import WorkerPool
from runtime.simulate.timeline import render

WORKERS = 2
BATCH = 32
LAYERS, WIDTH = 6, 256


def main() -> None:
    """The whole way through the house, in order."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    steps = options.parse_args().steps

    heading("1. Measure this machine (cached)")
    if stored_calibration() is None:
        calibrate_workers(WORKERS, count_case, measure_collectives).save(calibration_path())
    stored = stored_calibration()
    print(
        render_calibration(stored.calibration)
        if stored is not None
        else "no calibration: predictions rest on defaults"
    )

    heading("2. Plan GPT-2 over bytes on two local workers")
    model = gpt(LAYERS, WIDTH)
    plan = partition(model, ClusterSpec.local(WORKERS), batch_size=BATCH)
    print(plan)
    plan.save("plan.json")
    print("saved as plan.json")

    heading("3. The simulated step")
    print(render(plan.simulate(), width=100))

    heading("4. Verify: the plan's own programs in float64, beside the unpartitioned model")
    with WorkerPool(WORKERS) as pool:
        report = plan.verify(model, pool=pool)
        print(report)
        report.raise_if_different()

        heading(f"5. Train on {WORKERS} processes: the standard library's sources, as bytes")
        losses, seconds = pool.run(train, plan.model_dump_json(), steps, timeout_seconds=600.0)[0]
    for step in range(0, steps, max(1, steps // 10)):
        print(f"step {step:3}: loss {losses[step]:.3f}   {seconds[step] * 1e3:6.1f} ms")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")

    warm = sorted(seconds[2:] or seconds)
    measured = warm[len(warm) // 2]
    predicted = plan.prediction.step_seconds
    heading("6. Predicted beside measured")
    print(
        f"predicted step {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f} ms ({predicted / measured:.2f}x)"
    )


def train(plan_json: str, steps: int) -> tuple[list[float], list[float]]:
    """One worker's training: loss and seconds of every step."""
    plan = Plan.from_json(plan_json)
    losses, seconds = [], []
    with plan.deploy(gpt(LAYERS, WIDTH), learning_rate=1e-3) as engine:
        for batch in batches(plan.batch_size, steps):
            started = time.perf_counter()
            losses.append(float(engine.train_step(batch)))
            seconds.append(time.perf_counter() - started)
    return losses, seconds


def heading(text: str) -> None:
    """A line that stands out."""
    print(f"\n== {text}\n", flush=True)


if __name__ == "__main__":
    main()
