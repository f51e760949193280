"""The batch-size manager as a service (LB-BSP, BatchSizeManager): for workers of any framework and language.

``jobs`` makes the plans, ``service`` stores each event before it answers, ``app`` is the HTTP API.
"""
