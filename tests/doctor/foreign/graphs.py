"""Graphs that a library's own loader joins, in a script without functions, in the shape of PyTorch Geometric's."""

import torch
import torch.nn.functional as F
from common import BATCH, EPOCHS, Data, ended, setup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


class Batch:
    def __init__(self, graphs):
        self.num_graphs = len(graphs)
        self.x = torch.cat([x for x, _ in graphs])
        self.y = torch.stack([y for _, y in graphs])
        self.batch = torch.arange(len(graphs)).repeat_interleave(torch.tensor([len(x) for x, _ in graphs]))

    def to(self, device):
        return self


class GraphLoader(torch.utils.data.DataLoader):
    def __init__(self, dataset, batch_size=1, **kwargs):
        kwargs.pop("collate_fn", None)
        super().__init__(dataset, batch_size, collate_fn=Batch, **kwargs)


class Graphs(Data):
    """Of 1 to 5 nodes."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x.repeat(1 + index % 5, 1), y


class GIN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8).double(), torch.nn.Linear(8, 3).double()

    def forward(self, x, batch, size):
        h = torch.zeros(size, 8, dtype=x.dtype).index_add_(0, batch, self.inner(x).relu())
        return self.outer(h)


setup()
device = torch.device("cpu")
torch.manual_seed(0)
train_dataset = Graphs()
train_loader = GraphLoader(train_dataset, BATCH, sampler=DistributedSampler(train_dataset))
model = DistributedDataParallel(GIN().to(device))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    total_loss = 0
    for data in train_loader:
        data = data.to(device)
        optimizer.zero_grad()
        out = model(data.x, data.batch, data.num_graphs)
        loss = F.cross_entropy(out, data.y)
        loss.backward()
        optimizer.step()
        total_loss += float(loss) * data.num_graphs
    return total_loss / len(train_loader.dataset)


for epoch in range(1, EPOCHS + 1):
    loss = train()
    print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}")
ended(model)
