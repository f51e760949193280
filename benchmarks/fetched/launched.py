"""Runs somebody's training program within a rank that torchrun has started: ``launched.py PROGRAM ARGUMENTS...``

Here are processors and gloo. Each forward pass of a DistributedDataParallel module (with FOREIGN_SLOW, of a class of
that name) sleeps for FOREIGN_PAUSE seconds a sample, four times as long on the last rank. What is drawn at random for
a sample (noise, dropout, augmentation, pairs) is drawn alike in each division of a batch, and batch norm goes by its
running statistics, so that three ranks can be compared with one process. At the end each rank leaves what its
optimizers have trained, its samples and its seconds in FOREIGN_OUT.
"""

# The doctor must not take this file for the user's: it is run under a name that is none of a file.
SOURCE = r'''
import atexit, json, os, random, runpy, sys, time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data._utils.fetch import _MapDatasetFetcher

rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
pause = float(os.environ.get("FOREIGN_PAUSE", "0")) * (4 if ranks > 1 and rank == ranks - 1 else 1)
slow = os.environ.get("FOREIGN_SLOW", "DistributedDataParallel")
seen = {"samples": 0, "began": 0.0, "ended": 0.0, "steps": 0}
optimizers = []


def samples(given):
    for part in given.values() if isinstance(given, dict) else given:
        if isinstance(part, torch.Tensor) and part.ndim:
            return len(part)
        if isinstance(part, dict | list | tuple) and (found := samples(part)):
            return found
    return 0


def forward(module, arguments, named):
    if type(module).__name__ == slow and getattr(module, 'module', module).training and torch.is_grad_enabled():
        count = samples(arguments) or samples(named)
        seen["samples"] += count
        seen["began"] = seen["began"] or time.perf_counter()
        time.sleep(pause * count)


def stepped(optimizer, *_):
    if not any(optimizer is each for each in optimizers):
        optimizers.append(optimizer)
    seen["ended"], seen["steps"] = time.perf_counter(), seen["steps"] + 1


inner = torch.nn.Module.__call__


def called(self, *arguments, **named):
    if type(self).__name__ == slow:
        forward(self, arguments, named)
    return inner(self, *arguments, **named)


torch.nn.Module.__call__ = called
register_optimizer_step_post_hook(stepped)
joined = dist.init_process_group
dist.init_process_group = lambda backend=None, *a, **named: joined("gloo", *a, **named)
vision = torch.library.Library("torchvision", "DEF")  # whose own is built for CUDA, and is not found then
for name in ("nms", "qnms"):
    vision.define(f"{name}(Tensor a, Tensor b, float c) -> Tensor")


def alike(function, sizes):
    """Each sample's noise is that of any other, so that it does not depend on the division."""
    def drawn(*given, **named):
        at = sys._getframe(1).f_globals.get("__file__", "")
        if not at or os.path.dirname(os.path.abspath(at)) != os.getcwd():
            return function(*given, **named)
        size = given[sizes:]
        size = tuple(size[0]) if size and isinstance(size[0], list | tuple | torch.Size) else size
        with torch.random.fork_rng():
            torch.manual_seed(7)
            one = function(*given[:sizes], (1, *size[1:]), **named)
        return one.expand(size).clone()
    return drawn


torch.randn, torch.rand, torch.randint = alike(torch.randn, 0), alike(torch.rand, 0), alike(torch.randint, 2)
for name in ("dropout", "dropout1d", "dropout2d"):
    setattr(F, name, lambda x, *a, **named: x)
attend = F.scaled_dot_product_attention
F.scaled_dot_product_attention = lambda q, k, v, mask=None, dropout_p=0.0, *a, **named: attend(
    q, k, v, named.pop("attn_mask", mask), 0.0, *a, **named)
batch_norm = F.batch_norm
F.batch_norm = lambda x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5: batch_norm(
    x, mean, var, weight, bias, False, momentum, eps)


def fetched(self, indices):
    def one(index):
        random.seed(int(index)), np.random.seed(int(index)), torch.manual_seed(int(index))
        return self.dataset[index]
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        data = [one(index) for index in indices] if self.auto_collation else one(indices)
    random.setstate(before[0]), np.random.set_state(before[1])
    return self.collate_fn(data)


_MapDatasetFetcher.fetch = fetched


def ended():
    values = [p.detach().double().flatten() for each in optimizers for group in each.param_groups
              for p in group["params"]]
    told = {"parameters": torch.cat(values).tolist() if values else [], "samples": seen["samples"],
            "steps": seen["steps"], "seconds": seen["ended"] - seen["began"]}
    if out := os.environ.get("FOREIGN_OUT"):
        with open(os.path.join(out, f"{rank}.json"), "w") as file:
            json.dump(told, file)


if os.environ.get("FOREIGN_DOUBLE"):
    torch.set_default_dtype(torch.float64)
random.seed(1), np.random.seed(1), torch.manual_seed(1)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
atexit.register(ended)
runpy.run_path(sys.argv[0], run_name="__main__")
'''
exec(compile(SOURCE, "<launched>", "exec"))
