"""Two models with an optimizer each, in the shape of pytorch/examples' dcgan."""

import torch
from common import BATCH, EPOCHS, Data, net, setup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

setup()
dataset = Data()
dataloader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
netG = DDP(net(6))
netD = DDP(net(1))
criterion = torch.nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4)
for _epoch in range(EPOCHS):
    for real, _ in dataloader:
        size = len(real)
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(size, 1, dtype=real.dtype))
        errD_real.backward()
        fake = netG(torch.randn(size, 6, dtype=real.dtype))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(size, 1, dtype=real.dtype))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(size, 1, dtype=real.dtype))
        errG.backward()
        optimizerG.step()
