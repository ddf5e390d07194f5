import torch, pytest, tritonamp
from helpers import Net, take_step
from torch import nn
def test_first(cuda):
    out=[]
    for fields in ({}, {"offload":"state"}):
        torch.manual_seed(0)
        model=Net().to(cuda)
        opt=torch.optim.AdamW(model.parameters(), lr=1e-2)
        amp=tritonamp.enable(model,opt,level="O2",**fields)
        x=torch.randn(8,6,device=cuda)
        for i in range(5):
            take_step(amp,opt,model(x).square().mean()*(math.inf if i==2 else 1))
        out.append([m.cpu() for m in amp.master_params()]+[m.detach().cpu() for m in model.parameters()]+[v.cpu() for s in opt.state.values() for v in s.values()])
        if fields: print({k:(v.device,v.is_pinned()) for s in opt.state.values() for k,v in s.items()})
        amp.disable()
        if fields: print({k:(v.device) for s in opt.state.values() for k,v in s.items()})
    assert all(torch.equal(a,b) for a,b in zip(*out,strict=True))
import math
