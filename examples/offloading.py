"""Task offloading at the edge: how much to compute here, and how much on which server?

A device has 100 tasks in every round. What it keeps runs on its own processor, which slows down as it heats up;
what it sends to a server travels over a radio link that gets slower the more is sent, and waits there behind other
users' tasks. All costs rise with the number of tasks, none is a straight line, all change from round to round, and
each is known only after the round. DOLBIE needs no more than that.

    python examples/offloading.py [--rounds 200] [--servers 5] [--seed 0]
"""

import argparse

import numpy as np

from paceline import Cluster, Round, policies
from paceline.costs import Increasing
from paceline.shares import water_level

TASKS = 100


class Edge:
    """The device (worker 0) and its servers in one round after another."""

    def __init__(self, servers: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.speed = self._rng.uniform(40, 200, servers)  # tasks a second on an idle server
        self.rate = self._rng.uniform(60, 300, servers)  # tasks a second over an idle link
        self._busy = np.full(servers, 0.5)  # what other users take of each server
        self._fading = np.zeros(servers)  # of each link, in its logarithm
        self._load = 0.0  # of the device's own processor, likewise

    def next(self) -> Increasing:
        """The seconds of any number of tasks, for everybody, in the next round."""
        draw = self._rng.standard_normal
        self._busy = np.clip(self._busy + 0.05 * draw(len(self._busy)), 0.1, 0.9)
        self._fading = 0.9 * self._fading + 0.1 * draw(len(self._fading))
        self._load = 0.9 * self._load + 0.05 * draw()
        busy, rate, own = self._busy, self.rate * np.exp(self._fading), 20.0 * np.exp(self._load)

        def seconds(tasks):
            here, sent = tasks[..., :1], tasks[..., 1:]
            local = here / own * (1 + here / TASKS)  # heat: the clock slows down with sustained work
            travelling = sent / rate + (sent / rate) ** 1.5  # congestion on the own link
            # A queue's time grows without bound as the server nears its capacity (M/M/1), in units of a second.
            used = np.minimum(busy + (1 - busy) * 0.9 * sent / TASKS, 0.999)
            computing = sent / self.speed / (1 - used)
            return np.concatenate([local, travelling + computing], axis=-1)

        return Increasing(seconds, np.full(len(busy) + 1, float(TASKS)))


def play(name: str, rounds: int, servers: int, seed: int) -> tuple[float, np.ndarray]:
    """Total seconds of one policy, and its last division."""
    policy = policies.create(name, Cluster(servers + 1, TASKS))
    edge = Edge(servers, seed)
    plan, state = policy.init()
    total = 0.0
    for _ in range(rounds):
        costs, shares = edge.next(), plan.shares
        took = costs.seconds(shares * TASKS)
        total += took.max()
        plan, state = policy.step(state, Round(shares, took, TASKS, costs=costs))
    return total, shares


def best(rounds: int, servers: int, seed: int) -> tuple[float, np.ndarray]:
    """The same for who knows every round's costs beforehand."""
    edge = Edge(servers, seed)
    levels = [water_level(edge.next(), TASKS) for _ in range(rounds)]
    return float(sum(level.seconds for level in levels)), levels[-1].loads / TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--servers", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    what = (options.rounds, options.servers, options.seed)
    print(f"{TASKS} tasks a round, {options.servers} servers, {options.rounds} rounds")
    print(f"{'policy':24}{'seconds':>9}{'x best':>8}   last division: device | servers")
    least, division = best(*what)
    played = {
        name: play(name, *what) for name in ("equal", "ogd", "dolbie", "dolbie:monotone=false", "level")
    }
    for name, (total, shares) in (played | {"knowing all beforehand": (least, division)}).items():
        tasks = " ".join(f"{share * TASKS:.0f}" for share in shares[1:])
        print(f"{name:24}{total:>9.1f}{total / least:>8.2f}   {shares[0] * TASKS:.0f} | {tasks}")


if __name__ == "__main__":
    main()
