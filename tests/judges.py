"""Tests that others wrote for what they wrote, through a Pace or beside one, which trains with unlike loads.

    python tests/judges.py                 # all that come with installed packages; some minutes
    python tests/judges.py torch           # DistributedDataParallel's own tests, those of the CPU
    python tests/judges.py test_sync       # a script of Accelerate's
    python tests/judges.py --transformers DIR --accelerate DIR    # those that need a checkout of either, too

Those of torch need expecttest, those of a checkout datasets. Beside: before and behind the judge, the Pace runs
rounds whose model has to be that of one process within 1e-12, and the judge must not notice it: what tells waits from
work has replaced functions of torch throughout. Through: the judge's own loop takes its backward pass and its step by
a Pace, if it has a batch to divide. docs/hosts.md has the table of both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
SCRIPTS = {"test_sync": 3, "test_distributed_data_loop": 2, "test_ops": 2}  # and their ranks
NOT_HERE = (  # that wait for ever on processors without a Pace as well, or need torchdata
    *("test_can_join_uneven_inputs", "test_join_can_override_even_batches"),
    *("test_join_can_override_for_mixed_type_dataloaders", "test_stateful_dataloader"),
    *(
        "test_stateful_dataloader_save_state",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches",
    ),
)
EXAMPLE = "examples/by_feature/gradient_accumulation_for_autoregressive_models.py"
CHECKED_OUT = {  # of whom, and where
    "training_parity": ("transformers", "tests/trainer/distributed/scripts/training_parity.py"),
    "batch_rebalance_ddp": ("transformers", "tests/trainer/distributed/scripts/batch_rebalance_ddp.py"),
    "train_token_weighting": (
        "accelerate",
        "src/accelerate/test_utils/scripts/external_deps/train_token_weighting.py",
    ),
}
# Accelerate's example of accumulation over tokens, as docs/porting.md has it: from and behind which of its lines.
EXAMPLES_LOADER = "    total_batched_samples = 0\n"
EXAMPLES_ROUND = (
    "        for update_step in range(total_gradient_updates):\n",
    "losses.append(loss.detach())\n",
)
LOADER = """
    import judges
    from paceline.hosts.accelerate import AcceleratePace

    every = batch_size * gradient_accumulation_steps * accelerator.num_processes
    pace = AcceleratePace(accelerator, model, every, "level", limits=judges.limited(2), loop="round")
    train_dataloader = pace.loader(train_dataloader.dataset, shuffle=False)

    def forward(batch):
        return model(**batch, use_cache=False).loss, batch["labels"][:, 1:].ne(-100).sum()

"""
ROUND = """
        for update_step, batch in enumerate(train_dataloader):
            loss = pace.round(batch, forward)
            losses = [loss]
"""
SAMPLES, ROUNDS = 24, 6


def limited(least: int) -> list[Any]:
    """Limits that leave all but ``least`` samples of each other rank to the first."""
    return [(None, None), *[(None, least)] * (dist.get_world_size() - 1)]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@contextlib.contextmanager
def beside() -> Iterator[None]:
    """Rounds before and behind what is done within; all samples are in each, so their order is of no matter."""
    from paceline.torch import Pace

    made = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 4, generator=made, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=made)
    with torch.random.fork_rng():
        alone, ddp = net(), DistributedDataParallel(net())
    plain, ours = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (alone, ddp))
    seen: list[int] = []
    pace = Pace(ddp, SAMPLES, "level", limits=limited(3))
    loader = pace.loader(torch.utils.data.TensorDataset(x, y))

    def rounds() -> None:
        for _ in range(ROUNDS):
            nn.functional.cross_entropy(alone(x), y).backward()
            plain.step()
            plain.zero_grad()
            for part, labels in loader:
                seen.append(len(part))
                pace.backward(nn.functional.cross_entropy(ddp(part), labels))
                pace.step(ours)
        for one, other in zip(alone.parameters(), ddp.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12), "the model is not that of one process"
        assert max(seen) <= 3 if dist.get_rank() else min(seen) >= SAMPLES - 3 * (dist.get_world_size() - 1)

    with torch.random.fork_rng():
        rounds()
    yield
    with torch.random.fork_rng():
        rounds()
    pace.host.detach()
    pace.host.release()


def script(name: str) -> None:
    """One of Accelerate's, in a rank that torchrun has started."""
    dist.init_process_group("gloo")
    dist.destroy_process_group = lambda *_: None  # it is needed for longer
    with beside():
        module = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
        for left_out in NOT_HERE:
            setattr(module, left_out, lambda *_: None)
        module.main()
    dist.barrier()


def ported(example: Path) -> str:
    """Accelerate's example with a Pace in the place of its own accumulation."""
    head, loader, rest = example.read_text().partition(EXAMPLES_LOADER)
    between, first, rest = rest.partition(EXAMPLES_ROUND[0])
    _, last, tail = rest.partition(EXAMPLES_ROUND[1])
    if not (loader and first and last):
        raise SystemExit(f"{example} is not the one that the port was written for: port it by hand")
    return head + loader + LOADER + between + ROUND + tail


def of_a_checkout(path: str, out: str) -> None:
    """A script of a checkout, in a rank that torchrun has started."""
    if path.endswith("train_token_weighting.py"):
        sys.argv = [path, "--example", f"{out}/example.py", "--output", f"{out}/told"]
        runpy.run_path(path, run_name="__main__")
        return
    sys.argv = [path, "--output_dir", out]
    if path.endswith("training_parity.py"):
        transformers = importlib.import_module("transformers")
        from paceline.hosts.transformers import BalancedTrainer

        class Uneven(BalancedTrainer):
            def __init__(self, **options: Any) -> None:
                super().__init__(balance={"limits": limited(1)} if dist.is_initialized() else None, **options)

        transformers.Trainer = Uneven
        sys.argv += ["--report_to", "none", "--save_strategy", "no", "--use_cpu", "true"]
        # The script's model takes any keyword and leaves num_items_in_batch out of its loss, which the plain Trainer
        # multiplies by the number of ranks all the same, unless it is told not to.
        sys.argv += ["--average_tokens_across_devices", "false"]
        sys.argv += ["--per_device_train_batch_size", str(12 // int(os.environ["WORLD_SIZE"]))]
        runpy.run_path(path, run_name="__main__")
        return
    dist.init_process_group("gloo")
    dist.destroy_process_group = lambda *_: None  # it is needed for longer
    with beside():
        runpy.run_path(path, run_name="__main__")
    dist.barrier()


def content(name: str, path: Path, checkout: Path) -> bool:
    """Whether a script of a checkout is content."""
    with tempfile.TemporaryDirectory() as folder:
        told = []
        for ranks in (3, 1) if name == "training_parity" else (2 if name == "train_token_weighting" else 3,):
            out = Path(folder, str(ranks))
            out.mkdir()
            if name == "train_token_weighting":
                (out / "example.py").write_text(ported(checkout / EXAMPLE))
            command = [*TORCHRUN, f"--nproc-per-node={ranks}", str(Path(__file__))]
            done = subprocess.run(command, env=os.environ | {"JUDGE": str(path), "JUDGE_OUT": str(out)})
            if done.returncode:
                return False
            told += [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    if name == "batch_rebalance_ddp":
        return bool(told[0]["ok"])
    if name == "training_parity":
        print(*told, sep="\n")
        return len(told[0]) == 5 and apart(*told) < 1e-5
    tokens = [sum(batch["tokens"] for batch in rank["batches"]) for rank in told]
    gradients = max(apart(*rank["gradients"], rank["reference_gradients"]) for rank in told)
    parameters = max(apart(rank["parameters"], rank["reference_parameters"]) for rank in told)
    print(
        f"tokens of each rank: {tokens}; gradients {gradients:.1e} and parameters {parameters:.1e} from one process"
    )
    return tokens[0] > tokens[1] > 0 and gradients < 1e-6 and parameters < 1e-6


def apart(ours: list[float], theirs: list[float]) -> float:
    """The largest difference."""
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def of_torch() -> unittest.TestSuite:
    """DistributedDataParallel's own tests, each in two processes."""
    from torch.testing._internal.distributed import distributed_test as theirs

    class WithPace(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def run_test(self, name: str, pipe: Any) -> None:
            self.pace: Any = None
            with beside():
                super().run_test(name, pipe)
                if self.pace is not None:
                    self.pace.host.detach()

        def _test_DDP_niter(
            self, base: Any, ddp: Any, x: Any, target: Any, loss: Any, *given: Any, **named: Any
        ) -> None:
            """Torch's own loop, in which DDP's part goes through a Pace with unlike loads."""
            from paceline.torch import Pace

            _, rank, batch, save = given
            self.pace, self.sizes = Pace(ddp, batch, "level", limits=limited(1)), None
            for size in self.pace.sizes(5):
                sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
                dist.all_gather(sizes, torch.tensor([size]))
                assert int(max(sizes)) > int(min(sizes))
                named |= {"offset": int(sum(sizes[:rank])), "n_iter": 1}
                super()._test_DDP_niter(base, ddp, x, target, loss, size, rank, batch, save, **named)
                x = x[torch.randperm(batch)]

        def _test_DDP_helper(
            self, model: Any, x: Any, target: Any, loss: Any, *given: Any, **named: Any
        ) -> None:
            if not isinstance(model, DistributedDataParallel):
                super()._test_DDP_helper(model, x, target, loss, *given, **named)
                return
            if self.pace is None:  # a loop that compares with no other: its samples may be taken again
                from paceline.torch import Pace

                self.pace = Pace(model, len(x) * dist.get_world_size(), "level", limits=limited(1))
                self.sizes = self.pace.sizes()
            if self.sizes is not None:
                rows = torch.arange(next(self.sizes)) % len(x)
                x, target = x[rows], target[rows]
            self.pace.backward(loss(model.train()(x), target))

        def _model_step_with_zero_grad(self, model: Any) -> None:
            if isinstance(model, DistributedDataParallel):
                self.pace.step(Added(model.parameters()))
            else:
                super()._model_step_with_zero_grad(model)

    globals()["WithPace"] = WithPace
    WithPace.__qualname__ = "WithPace"
    names = [name for name in dir(WithPace) if name.startswith("test_") and name_of_ddp(name)]
    if not torch.cuda.is_available():  # each of them would start two processes to find that out
        names = [name for name in names if not needs_a_gpu(getattr(WithPace, name))]
    return unittest.TestSuite(WithPace(name) for name in names)


class Added(torch.optim.Optimizer):
    """Torch's tests step by adding the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:  # one of theirs is frozen
                parameter += parameter.grad


def needs_a_gpu(test: Any) -> bool:
    """By its decorators."""
    return "gpu" in inspect.getsource(test).partition("def test_")[0].lower()


def name_of_ddp(name: str) -> bool:
    return "ddp" in name.lower() or "DistributedDataParallel" in name or name.startswith("test_static_graph")


def main() -> int:
    if judge := os.environ.get("JUDGE"):
        if judge.endswith(".py"):
            of_a_checkout(judge, os.environ["JUDGE_OUT"])
        else:
            script(judge)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*SCRIPTS, "torch", *CHECKED_OUT]
    parser.add_argument("judges", nargs="*", metavar="JUDGE", help=", ".join(known))
    for project in ("accelerate", "transformers"):
        parser.add_argument(f"--{project}", type=Path, metavar="DIR", help=f"a checkout of {project}")
    args = parser.parse_intermixed_args()
    if unknown := [name for name in args.judges if name not in known]:
        parser.error(f"{unknown[0]}: expected some of {', '.join(known)}")
    failed = []
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    there = [name for name, (project, _) in CHECKED_OUT.items() if getattr(args, project)]
    for name in args.judges or [*SCRIPTS, "torch", *there]:
        if name in CHECKED_OUT:
            project, path = CHECKED_OUT[name]
            checkout = getattr(args, project)
            if checkout is None:
                parser.error(f"{name} needs --{project} DIR, a checkout of {project}")
            for each in (path, EXAMPLE) if project == "accelerate" else (path,):
                if not (checkout / each).is_file():
                    parser.error(
                        f"--{project} {checkout}: {each} is not there; expected a checkout of {project}"
                    )
            passed = content(name, checkout.absolute() / path, checkout)
        elif name == "torch":
            passed = unittest.TextTestRunner(verbosity=2).run(of_torch()).wasSuccessful()
        else:
            command = [*TORCHRUN, f"--nproc-per-node={SCRIPTS[name]}", str(Path(__file__))]
            passed = not subprocess.run(command, env=os.environ | {"JUDGE": name}).returncode
        print(f"{name}: {'passed' if passed else 'FAILED'}", flush=True)
        failed += [] if passed else [name]
    return 1 if failed else 0


os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("TEMP_DIR", "/tmp")
everything = len(sys.argv) == 1 and "JUDGE" not in os.environ
if everything or "torch" in sys.argv or os.environ.get("JUDGE_TORCH"):
    os.environ["JUDGE_TORCH"] = "1"  # their processes import this file, and look for the class
    of_torch()
if __name__ == "__main__":
    sys.exit(main())
