"""A replay memory, in the shape of PyTorch's tutorial on reinforcement learning."""

import random
from collections import deque

import torch
from common import EPOCHS, net, pause, setup
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH_SIZE = 16
setup()
memory = deque(maxlen=200)
policy_net = DDP(net())
target_net = net()
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3, amsgrad=True)


def select_action(state):
    with torch.no_grad():
        return policy_net.module(state).max(1).indices.view(1, 1)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    pause(BATCH_SIZE)
    transitions = random.sample(memory, BATCH_SIZE)
    state_batch, action_batch, reward_batch = (torch.cat(part) for part in zip(*transitions, strict=True))
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    with torch.no_grad():
        expected = target_net(state_batch).max(1).values * 0.99 + reward_batch
    loss = torch.nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


state = torch.randn(1, 6, dtype=torch.float64)
for _ in range(BATCH_SIZE + EPOCHS):
    action = select_action(state)
    memory.append((state, action, torch.tensor([1.0], dtype=torch.float64)))
    state = torch.randn(1, 6, dtype=torch.float64)
    optimize_model()
