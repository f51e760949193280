"""Coded matrix products on uneven workers: which rows are computed redundantly, and where.

After Sun, Zhao, Zhou and Gunduz, "Heterogeneous Coded Computation across Heterogeneous Workers" (2019).
"""

from paceline.coded.coded_plan import CodedPlan, plan, read_plan
from paceline.coded.deadline import by_deadline
from paceline.coded.delay import Delay, Empirical, Fit, ShiftedExponential, Transmitted, Weibull, fit
from paceline.coded.layout import Layout, layout, relayout
from paceline.coded.problem import Problem, random_problem, read_problem, read_times
from paceline.coded.rearranged import Rearranged, rearrange
from paceline.coded.simulate import Completion, simulate, stretched, work_queue

__all__ = [
    "CodedPlan",
    "Completion",
    "Delay",
    "Empirical",
    "Fit",
    "Layout",
    "Problem",
    "Rearranged",
    "ShiftedExponential",
    "Transmitted",
    "Weibull",
    "by_deadline",
    "fit",
    "layout",
    "plan",
    "random_problem",
    "read_plan",
    "read_problem",
    "read_times",
    "rearrange",
    "relayout",
    "simulate",
    "stretched",
    "work_queue",
]
