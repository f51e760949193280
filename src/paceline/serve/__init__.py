"""The batch-size manager as a service (LB-BSP, BatchSizeManager): for workers of any framework and language.

``jobs`` decides, ``service`` stores what happened before it answers, ``app`` speaks HTTP.
"""
