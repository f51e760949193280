"""Balanced batches inside other training frameworks: one short file per host, all built on ``paceline.torch.Pace``.

Each host is imported only when it is used, so that the user of one host does not need the others:

    from paceline.hosts.lightning import BalancedCallback       # Lightning's Trainer
    from paceline.hosts.fabric import FabricPace                # Lightning Fabric
    from paceline.hosts.accelerate import AcceleratePace        # Accelerate
    from paceline.hosts.transformers import BalancedTrainer     # the Hugging Face Trainer
    from paceline.hosts.ray_train import RayTrainPace           # Ray Train
    from paceline.hosts.accumulating import AccumulatingPace    # a loop of your own that accumulates
"""
