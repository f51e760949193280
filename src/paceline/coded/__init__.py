"""Coded matrix products on uneven workers: what is computed twice?

After Sun, Zhao, Zhou and Gunduz, "Heterogeneous Coded Computation across Heterogeneous Workers" (2019).
"""

from paceline.coded.delay import Delay, Empirical, ShiftedExponential, Transmitted, Weibull
from paceline.coded.planning import CodedPlan, plan
from paceline.coded.problem import Problem, random_problem, read_problem

__all__ = [
    "CodedPlan",
    "Delay",
    "Empirical",
    "Problem",
    "ShiftedExponential",
    "Transmitted",
    "Weibull",
    "plan",
    "random_problem",
    "read_problem",
]
