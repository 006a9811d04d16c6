# fmt: off
# ruff: noqa
"""Networks as users export them, round what goes wrong in FP16: parts, states, types, shapes and operators.

They were drawn without a look at the tool's rules. `strangers.py` exports, fixes and judges them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensors = tuple[torch.Tensor, ...]
Slice = tuple[int, int, int]
"""Axis, start and end of a part of an output."""


@dataclass(frozen=True)
class Stranger:
    """A network with a function that makes a sample from its number.

    Attributes:
        kind: What it was drawn as: right or wrong in plain FP16, or refused by TensorRT.
        dynamic: Axes of inputs that are dynamic, by name.
        parts: Slices by number of the output, which are judged by themselves.
        options: More words of the command line.
    """

    name: str
    kind: str
    module: nn.Module
    sample: Callable[[int], Tensors]
    dynamic: Sequence[dict[int, str]] = ()
    parts: dict[int, list[Slice]] = field(default_factory=dict)
    options: tuple[str, ...] = ()


STRANGERS: list[Stranger] = []


def add(
    name: str,
    kind: str,
    module: nn.Module,
    sample: Callable[[int], Tensors],
    dyn: Sequence[dict[int, str]] = (),
    parts: dict[int, list[Slice]] | None = None,
    extra: Sequence[str] = (),
) -> None:
    STRANGERS.append(Stranger(name, kind, module.eval(), sample, dyn, parts or {}, tuple(extra)))


class Fn(nn.Module):
    """A function of this module and its inputs."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


torch.manual_seed(0)
def g(seed): return torch.Generator().manual_seed(seed)
def rn(*s): return lambda i: (torch.randn(*s, generator=g(i)),)
def mlp(i,h,o): return nn.Sequential(nn.Linear(i,h), nn.GELU(), nn.Linear(h,h), nn.GELU(), nn.Linear(h,o))
def yolo(s,x):
    h=F.silu(s.c(x)); h=F.silu(s.d(h)); y=s.o(h).flatten(2)
    b=(y[:,:4].sigmoid()*2*s.a+s.g)*1.0
    return torch.cat([b,y[:,4:].sigmoid()],1)
gy,gx=torch.meshgrid(torch.arange(8.)*8,torch.arange(8.)*8,indexing='ij')
m=Fn(yolo,c=nn.Conv2d(3,16,3,2,1),d=nn.Conv2d(16,32,3,2,1),o=nn.Conv2d(32,14,3,2,1))
m.register_buffer('g',torch.stack([gx.flatten(),gy.flatten(),gx.flatten(),gy.flatten()])[None]); m.register_buffer('a',torch.tensor([16.,16,30,30]).view(1,4,1))
add('yolo_head','right',m,lambda i:(torch.rand(1,3,64,64,generator=g(i)),),parts={0:[(1,0,4),(1,4,14)]})
add('mu_sigma','right',Fn(lambda s,x:torch.cat([s.a(x)*50,F.softplus(s.b(x))*0.01],-1),a=mlp(32,64,3),b=mlp(32,64,3)),rn(16,32),parts={0:[(1,0,3),(1,3,6)]})
def dead(s,x):
    return (s.m(x)+s.bias).sigmoid()
m=Fn(dead,m=mlp(32,64,8)); m.register_buffer('bias',torch.tensor([0,0,0,-17.,0,0,-19,0]))
add('dead_classes','right',m,rn(32,32),parts={0:[(1,0,3)]})
add('onehot_softmax','right',Fn(lambda s,x:(s.c(x)*40).softmax(1),c=nn.Conv2d(3,20,3,1,1)),rn(1,3,32,32))
def causal(s,x):
    B,T,C=x.shape; q,k,v=s.qkv(x).view(B,T,3,4,C//4).permute(2,0,3,1,4)
    a=q@k.transpose(-1,-2)/math.sqrt(C//4)+s.mask[:T,:T]
    return s.o((a.softmax(-1)@v).transpose(1,2).reshape(B,T,C)), a
m=Fn(causal,qkv=nn.Linear(64,192),o=nn.Linear(64,64)); m.register_buffer('mask',torch.triu(torch.full((32,32),-1e4),1))
add('mask_1e4_scores','right',m,rn(2,32,64))
def rope_tab(s,x):
    x1,x2=x.chunk(2,-1); return s.o(torch.cat([x1*s.c-x2*s.s_,x2*s.c+x1*s.s_],-1))
inv=1/10000**(torch.arange(0,64,2)/64); ang=torch.arange(1024.)[:,None]*inv
m=Fn(rope_tab,o=nn.Linear(64,64)); m.register_buffer('c',ang.cos()); m.register_buffer('s_',ang.sin())
add('rope_tables','right',m,rn(1,1024,64))
add('running_mean_64','right',Fn(lambda s,x:s.m(x.cumsum(1)/torch.arange(1,x.shape[1]+1)[None,:,None]),m=mlp(16,32,8)),rn(2,64,16))
add('logsumexp_pool','right',Fn(lambda s,x:torch.logsumexp(s.m(x),1),m=mlp(16,64,8)),rn(2,100,16),dyn=[{1:'T'}])
add('cosine_pairs','right',Fn(lambda s,x,y:F.normalize(s.m(x),dim=-1)@F.normalize(s.m(y),dim=-1).T,m=mlp(32,64,32)),lambda i:(torch.randn(40,32,generator=g(i)),torch.randn(30,32,generator=g(i+9))))
def detr(s,x):
    h=s.e(x)+s.pos; h=s.t(h)
    return s.cl(h),s.bx(h).sigmoid()
m=Fn(detr,e=nn.Linear(16,64),t=nn.TransformerEncoderLayer(64,4,128,batch_first=True,dropout=0.),cl=nn.Linear(64,12),bx=mlp(64,64,4)); m.pos=nn.Parameter(torch.randn(1,50,64)*.1)
add('detr_heads','right',m.eval(),rn(1,50,16))
m=mlp(32,64,8); m[4].weight.data[3]*=1e-3; m[4].bias.data[3]*=1e-3
add('quiet_channel','right',m,rn(64,32),parts={0:[(1,3,4)]})
add('f64_mean','right',Fn(lambda s,x:s.m(x.double().mean(1).float()),m=mlp(16,32,4)),rn(4,300,16))
add('lstm_500','right',Fn(lambda s,x:s.o(s.l(x)[0]),l=nn.LSTM(8,32,batch_first=True),o=nn.Linear(32,4)),rn(1,500,8))
add('bigru_200','right',Fn(lambda s,x:s.o(s.l(x)[0]),l=nn.GRU(8,32,batch_first=True,bidirectional=True),o=nn.Linear(64,4)),rn(1,200,8))
def logstft(s,x):
    f=F.conv1d(x[:,None],s.k,stride=64); p=f[:,:65]**2+f[:,65:]**2
    return s.m(torch.log1p(p.transpose(1,2)@s.mel))
n=torch.arange(128.); k=torch.arange(65.)[:,None]; w=torch.hann_window(128)
K=torch.cat([(2*math.pi*k*n/128).cos()*w,(2*math.pi*k*n/128).sin()*w])[:,None]
m=Fn(logstft,m=mlp(20,32,8)); m.register_buffer('k',K); m.register_buffer('mel',torch.rand(65,20,generator=g(3))*(torch.rand(65,20,generator=g(4))>.8))
add('stft_log1p','right',m,lambda i:(torch.randn(1,4000,generator=g(i))*.3,))
def moe(s,x):
    p=(s.gate(x)*3).softmax(-1); w,ix=p.topk(2,-1)
    h=torch.einsum('td,edh->teh',x,s.w1); h=F.gelu(h); y=torch.einsum('teh,ehd->ted',h,s.w2)
    sel=y.gather(1,ix[...,None].expand(-1,-1,y.shape[-1])); return (sel*w[...,None]).sum(1)
m=Fn(moe,gate=nn.Linear(32,8)); m.w1=nn.Parameter(torch.randn(8,32,64)/6); m.w2=nn.Parameter(torch.randn(8,64,32)/8)
add('moe_far_gates','right',m,lambda i:(torch.randn(4,32,generator=g(i+50)),))
add('topk_indices','right',Fn(lambda s,x:((x@s.w).topk(5,-1)),w=torch.eye(20)),lambda i:((torch.stack([torch.randperm(20,generator=g(i*7+j)) for j in range(4)])*1.5).float(),))
add('rmsnorm_block','right',Fn(lambda s,x:x+s.m(s.n(x*8)),n=nn.RMSNorm(64),m=mlp(64,128,64)),rn(2,20,64))
def heat(s,x):
    return (s.c(F.relu(s.b(x)))*6-14).sigmoid()
add('sparse_heatmap','right',Fn(heat,b=nn.Conv2d(3,16,3,1,1),c=nn.Conv2d(16,5,1)),lambda i:(torch.randn(1,3,48,48,generator=g(i))*2,))
def softarg(s,x):
    p=(s.c(x)*4).flatten(2).softmax(-1); return torch.stack([(p*s.x).sum(-1),(p*s.y).sum(-1)],-1)
yy,xx=torch.meshgrid(torch.arange(32.),torch.arange(32.),indexing='ij')
m=Fn(softarg,c=nn.Conv2d(3,6,5,1,2)); m.register_buffer('x',xx.flatten()); m.register_buffer('y',yy.flatten())
add('soft_argmax','right',m,rn(1,3,32,32))
add('token_passthrough','right',Fn(lambda s,t:(s.o(s.e(t)),t),e=nn.Embedding(100,32),o=nn.Linear(32,100)),lambda i:(torch.randint(0,100,(2,17),generator=g(i)),))
class Blk(nn.Module):
    def __init__(s):
        super().__init__(); s.n=nn.GroupNorm(8,32); s.c=nn.Conv2d(32,32,3,1,1); s.t=nn.Linear(16,32)
    def forward(s,x,t): return x+s.c(F.silu(s.n(x)+s.t(t)[:,:,None,None]))
add('groupnorm_block','right',Blk(),lambda i:(torch.randn(2,32,16,16,generator=g(i)),torch.randn(2,16,generator=g(i+5))))
add('where_min_mask','right',Fn(lambda s,x,k:torch.where(k,s.m(x),torch.finfo(torch.float32).min),m=mlp(16,32,40)),lambda i:(torch.randn(6,16,generator=g(i)),torch.rand(6,40,generator=g(i+3))>.6))
add('attention_pool_dynamic','right',Fn(lambda s,x:((s.a(x)).softmax(1)*s.v(x)).sum(1),a=nn.Linear(32,1),v=nn.Linear(32,32)),rn(1,200,32),dyn=[{1:'T'}])
def norm_ema(s,x):
    y=[]; h=torch.zeros(x.shape[0],x.shape[2])
    for t in range(24): h=0.9*h+0.1*x[:,t]; y.append(h)
    return s.o(torch.stack(y,1))
add('unrolled_ema','right',Fn(norm_ema,o=nn.Linear(16,4)),rn(2,24,16))
add('mean_var_pool','right',Fn(lambda s,x:torch.cat([x.mean(1),x.std(1)],-1)@s.w,w=torch.randn(32,8,generator=g(1))/5),rn(4,150,16),dyn=[{1:'T'}])
add('grid_sample','right',Fn(lambda s,x,t:F.grid_sample(s.c(x),F.affine_grid(t,[1,8,24,24],align_corners=False),align_corners=False),c=nn.Conv2d(3,8,3,1,1)),lambda i:(torch.randn(1,3,24,24,generator=g(i)),torch.tensor([[[1.,.1,0],[-.1,1,.05]]])))
add('timestamps','wrong',Fn(lambda s,t,x:s.m(torch.cat([torch.diff(t,dim=1),x[:,1:]],-1)),m=mlp(9,32,4)),lambda i:(torch.cumsum(torch.rand(1,60,1,generator=g(i)),1)+1e4,torch.randn(1,60,8,generator=g(i+2))*.1))
add('running_mean_long','wrong',Fn(lambda s,x:x.cumsum(1)/torch.arange(1,x.shape[1]+1)[None,:,None]),lambda i:(torch.rand(1,8000,4,generator=g(i))*20,))
add('naive_logsumexp','wrong',Fn(lambda s,x:torch.log(torch.exp(s.m(x)*60).sum(1)),m=mlp(16,64,8)),rn(2,50,16))
def logmel(s,x):
    f=F.conv1d(x[:,None],s.k,stride=64); p=f[:,:65]**2+f[:,65:]**2
    l=torch.log10((p.transpose(1,2)@s.mel).clamp(min=1e-10)); l=torch.maximum(l,l.amax()-8); return (l+4)/4
m=Fn(logmel); m.register_buffer('k',K); m.register_buffer('mel',torch.rand(65,20,generator=g(3))*(torch.rand(65,20,generator=g(4))>.8)*.02)
add('whisper_logmel','wrong',m,lambda i:(torch.randn(1,4000,generator=g(i))*torch.linspace(0,1,4000)**4*.05,))
def pd(s,x,y):
    d=(x**2).sum(-1,keepdim=True)-2*x@y.transpose(-1,-2)+(y**2).sum(-1)[:,None]; return d.clamp(min=0).sqrt()
def far(i):
    c=torch.tensor([[120.,80,40]]); return (c+torch.randn(1,50,3,generator=g(i)),c+torch.randn(1,30,3,generator=g(i+7)))
add('pair_distance_far','wrong',Fn(pd),far)
def gridoff(s,c,x):
    off=(s.g[None]-c[:,None]) ; return s.m(torch.cat([torch.exp(-(off/2)**2),x],-1))
m=Fn(gridoff,m=mlp(6,32,3)); m.register_buffer('g',torch.rand(200,2,generator=g(8))*10+4000)
add('pixel_grid_offset','wrong',m,lambda i:(torch.rand(1,2,generator=g(i))*10+4000,torch.randn(1,200,4,generator=g(i))))
def rope(s,x,p):
    a=p[...,None].float()*s.inv; c,s_=a.cos(),a.sin(); x1,x2=x.chunk(2,-1); return torch.cat([x1*c-x2*s_,x2*c+x1*s_],-1)
m=Fn(rope); m.register_buffer('inv',inv)
add('rope_30000','wrong',m,lambda i:(torch.randn(1,64,64,generator=g(i)),torch.arange(30000+i*100,30064+i*100)[None]))
def complement(s,x):
    y=s.m(x); p=(y[:,4:]+8).sigmoid(); return torch.cat([y[:,:4]*100,1-p],1)
add('complement_beside_boxes','wrong',Fn(complement,m=mlp(32,64,7)),rn(50,32),parts={0:[(1,0,4),(1,4,7)]})
add('f64_variance','wrong',Fn(lambda s,x:((x.double()**2).mean(1)-x.double().mean(1)**2).float()),lambda i:(torch.randn(2,400,8,generator=g(i))*.5+60,))
def opengates(l):
    h=l.hidden_size; l.bias_ih_l0.data[:2*h]=9.; l.weight_hh_l0.data*=0; l.weight_ih_l0.data*=.3; l.weight_ih_l0.data[2*h:3*h]=l.weight_ih_l0.data[2*h:3*h].abs()*1; l.bias_hh_l0.data*=0; return l
add('lstm_integrator','wrong',Fn(lambda s,x:s.o(s.l(x)[1][1]*.001),l=opengates(nn.LSTM(4,8,batch_first=True)),o=nn.Linear(8,4)),lambda i:(torch.rand(1,3000,4,generator=g(i))+1,))
def slowgru(l):
    h=l.hidden_size; l.bias_ih_l0.data[h:2*h]=7.5; l.weight_ih_l0.data[h:2*h]=0; l.weight_hh_l0.data[h:2*h]=0; return l
add('gru_slow','wrong',Fn(lambda s,x:s.l(x)[0],l=slowgru(nn.GRU(4,8,batch_first=True))),lambda i:(torch.rand(1,1500,4,generator=g(i)),))
add('mask_times_1e9','wrong',Fn(lambda s,x,m:((s.a(x)@s.b(x).transpose(-1,-2))+(1-m)[:,None]*-1e9).softmax(-1)@x,a=nn.Linear(32,32),b=nn.Linear(32,32)),lambda i:(torch.randn(2,20,32,generator=g(i)),(torch.arange(20)[None]<torch.tensor([[20],[11+i]])).float()))
add('normalize_tiny','wrong',Fn(lambda s,x:s.m(F.normalize(x,dim=-1)),m=mlp(32,32,8)),lambda i:(torch.randn(16,32,generator=g(i))*2e-5,))
def nerf(s,sig,d):
    a=1-torch.exp(-sig*d); T=torch.exp(-torch.cumsum(sig*d,-1)); return (a*T*s.t).sum(-1), a
m=Fn(nerf); m.register_buffer('t',torch.linspace(2,6,192))
add('nerf_alpha','wrong',m,lambda i:(torch.rand(64,192,generator=g(i))*.02,torch.full((64,192),4/192)))
add('depth_from_disparity','wrong',Fn(lambda s,l,r:700*.5/((s.c(l)-s.c(r)).abs().mean(1)*.002+1e-6),c=nn.Conv2d(3,8,3,1,1)),lambda i:(lambda a:(a,a+torch.randn(1,3,24,24,generator=g(i+3))*.01))(torch.randn(1,3,24,24,generator=g(i))))
add('sac_logprob','wrong',Fn(lambda s,x:torch.log(1-torch.tanh(s.m(x)*8)**2+1e-6).sum(-1),m=mlp(16,64,4)),rn(32,16))
add('log_softmax_1e8','wrong',Fn(lambda s,x:torch.log((s.m(x)*60).softmax(-1)+1e-8),m=mlp(16,64,10)),rn(32,16))
add('instance_norm_small','wrong',Fn(lambda s,x:s.c(s.n(x*1e-3)),n=nn.InstanceNorm2d(8,eps=1e-9),c=nn.Conv2d(8,4,1)),rn(1,8,16,16))
add('arccos_close','wrong',Fn(lambda s,x,y:torch.acos((F.normalize(x,dim=-1)*F.normalize(y,dim=-1)).sum(-1).clamp(-1,1))),lambda i:(lambda a:(a,a+.01*torch.randn(40,16,generator=g(i+2))))(torch.randn(40,16,generator=g(i))))
add('fourier_features','wrong',Fn(lambda s,x:s.m(torch.cat([torch.sin(x[...,None]*s.fr).flatten(1),torch.cos(x[...,None]*s.fr).flatten(1)],-1)),m=mlp(48,64,3)),lambda i:(torch.rand(100,2,generator=g(i)),))
STRANGERS[-1].module.register_buffer('fr',2**torch.arange(12.)*math.pi)
def euler(s,x,v):
    for _ in range(400): v=v-0.002*x; x=x+0.002*v
    return torch.cat([x,v],-1)
add('euler_steps','wrong',Fn(euler),lambda i:(torch.randn(4,3,generator=g(i))*5,torch.randn(4,3,generator=g(i+1))*.02))
add('sum_pool_profile','wrong',Fn(lambda s,x:torch.log1p(F.softplus(s.m(x)).sum(1)),m=mlp(8,32,4)),lambda i:(torch.randn(1,100,8,generator=g(i))*10,),dyn=[{1:'T'}],extra=['--max-shapes','x0:1x200000x8'])
add('optical_flow_coords','wrong',Fn(lambda s,c,f:(c+f*.01)-c.round()),lambda i:(torch.rand(1,2,30,30,generator=g(i))*2000,torch.randn(1,2,30,30,generator=g(i+1))))
add('age_from_dates','wrong',Fn(lambda s,a,b,x:s.m(torch.cat([((a-b)/365.25),x],-1)),m=mlp(5,32,2)),lambda i:(torch.full((8,1),738000.)+torch.randint(0,300,(8,1),generator=g(i)),torch.full((8,1),738000.)-torch.randint(0,600,(8,1),generator=g(i+1)),torch.randn(8,4,generator=g(i))*.1))
add('two_outputs_quiet_batch','wrong',Fn(lambda s,x:s.m(x)**4*1e-3,m=mlp(16,32,4)),lambda i:(torch.cat([torch.randn(3,16,generator=g(i))*3,torch.randn(1,16,generator=g(i))*.1]),),parts={0:[(0,3,4),(0,0,3)]})
add('gaussian_nll','wrong',Fn(lambda s,x:(lambda y:torch.exp(-.5*y[:,:1]**2*40)/(torch.exp(y[:,1:2]*6)))(s.m(x)*2),m=mlp(16,64,2)),rn(64,16))
add('fft_power','refused',Fn(lambda s,x:s.m(torch.log1p(torch.fft.rfft(x).abs())),m=mlp(65,32,4)),rn(2,128))
add('cumprod','refused',Fn(lambda s,x:torch.cumprod(x.sigmoid(),-1)),rn(2,16))
add('det','refused',Fn(lambda s,x:torch.linalg.det(x)),rn(4,3,3))
add('antialias','refused',Fn(lambda s,x:s.c(F.interpolate(x,size=(20,20),mode='bilinear',antialias=True)),c=nn.Conv2d(3,4,3)),rn(1,3,48,48))
add('scatter_amax','refused',Fn(lambda s,x,i:torch.zeros(1,10).scatter_reduce(1,i,x,'amax',include_self=False)),lambda i:(torch.randn(1,30,generator=g(i)),torch.randint(0,10,(1,30),generator=g(i))))
add('unpool','refused',Fn(lambda s,x:F.max_unpool2d(*F.max_pool2d(s.c(x),2,return_indices=True),2),c=nn.Conv2d(3,4,3,1,1)),rn(1,3,16,16))
add('bitshift','refused',Fn(lambda s,x:s.e(x>>4)[...,0],e=nn.Embedding(16,8)),lambda i:(torch.randint(0,255,(1,12),generator=g(i)),))
add('lppool3','refused',Fn(lambda s,x:F.lp_pool2d(s.c(x).abs(),3,2),c=nn.Conv2d(3,4,3)),rn(1,3,16,16))
torch.manual_seed(1)
class EncBlk(nn.Module):
    def __init__(s,d=64,h=4):
        super().__init__(); s.n1=nn.LayerNorm(d); s.n2=nn.LayerNorm(d); s.qkv=nn.Linear(d,3*d); s.o=nn.Linear(d,d); s.f=nn.Sequential(nn.Linear(d,4*d),nn.GELU(),nn.Linear(4*d,d)); s.h=h
    def forward(s,x,mask=None):
        B,T,C=x.shape; q,k,v=s.qkv(s.n1(x)).view(B,T,3,s.h,C//s.h).permute(2,0,3,1,4)
        a=q@k.transpose(-1,-2)/math.sqrt(C//s.h)
        if mask is not None: a=a.masked_fill(~mask[:,None,None],float('-inf'))
        x=x+s.o((a.softmax(-1)@v).transpose(1,2).reshape(B,T,C)); return x+s.f(s.n2(x))
add('inf_masked_fill','right',EncBlk(),lambda i:(torch.randn(2,24,64,generator=g(i)),torch.arange(24)[None]<torch.tensor([[24],[13+i]])))
def sink(s,x):
    x=torch.cat([x[:,:1]*60,x[:,1:]],1); return s.b(x)
add('attention_sink','right',Fn(sink,b=EncBlk()),rn(1,30,64),parts={0:[(1,1,30)]})
add('depth_and_normals','right',Fn(lambda s,x:torch.cat([F.softplus(s.d(x))*20,F.normalize(s.n(x),dim=1)],1),d=nn.Conv2d(3,1,3,1,1),n=nn.Conv2d(3,3,3,1,1)),rn(1,3,20,20),parts={0:[(1,0,1),(1,1,4)]})
add('softmax_1000','right',Fn(lambda s,x:(s.m(x)*6).softmax(-1),m=mlp(32,64,1000)),rn(4,32))
add('masked_mean','right',Fn(lambda s,x,m:((x*m[...,None]).sum(1)/m.sum(1,keepdim=True).clamp(min=1e-9))@s.w,w=torch.randn(32,8,generator=g(2))/6),lambda i:(torch.randn(3,40,32,generator=g(i)),(torch.arange(40)[None]<torch.tensor([[40],[20],[5+i]])).float()))
add('loud_and_quiet_clip','right',Fn(lambda s,x:s.b(F.leaky_relu(s.a(x),.1)),a=nn.Conv1d(1,16,9,bias=False),b=nn.Conv1d(16,4,9,bias=False)),lambda i:(torch.randn(3,1,400,generator=g(i))*torch.tensor([1.,2e-2,.5]).view(3,1,1),),parts={0:[(0,1,2)]})
def bucket(s,x): return torch.bucketize((x*4).round()/4+.1,s.e), s.m(x)
m=Fn(bucket,m=mlp(16,32,4)); m.register_buffer('e',torch.linspace(-2,2,17))
add('count_over','right',Fn(lambda s,x:((x*4).round()/4+.1>s.e[:,None,None]).sum(0),e=torch.linspace(-2,2,17)),rn(8,16))
add('f64_positions','right',Fn(lambda s,x:s.m(x+torch.sin(torch.arange(x.shape[1],dtype=torch.float64)/50)[None,:,None].float()),m=mlp(16,32,4)),rn(2,100,16))
add('swiglu_rms','right',Fn(lambda s,x:x+s.d(F.silu(s.a(s.n(x)))*s.b(s.n(x))),n=nn.RMSNorm(64,eps=1e-6),a=nn.Linear(64,128),b=nn.Linear(64,128),d=nn.Linear(128,64)),rn(2,20,64))
add('pixel_shuffle_sr','right',Fn(lambda s,x:F.pixel_shuffle(s.b(F.relu(s.a(x))),2)+F.interpolate(x,scale_factor=2,mode='bilinear'),a=nn.Conv2d(3,32,3,1,1),b=nn.Conv2d(32,12,3,1,1)),lambda i:(torch.rand(1,3,32,32,generator=g(i)),))
add('huber_scores','right',Fn(lambda s,x:(s.m(x).argmax(-1),s.m(x).softmax(-1).max(-1).values),m=mlp(16,64,5)),lambda i:(torch.randn(32,16,generator=g(i))*3,))
add('lstm_2layer_800','right',Fn(lambda s,x:(lambda o:(s.o(o[0]),o[1][0],o[1][1]))(s.l(x)),l=nn.LSTM(8,32,2),o=nn.Linear(32,4)),rn(800,1,8))
def temb(s,t):
    f=torch.exp(-math.log(10000)*torch.arange(32)/32); a=t[:,None].float()*f[None]; return s.m(torch.cat([a.cos(),a.sin()],-1))
add('timestep_embedding','wrong',Fn(temb,m=mlp(64,64,8)),lambda i:(torch.tensor([997.,613.,421.,879.])-i*3,))
n=torch.arange(256.); k=torch.arange(129.)[:,None]
KK=torch.cat([(2*math.pi*k*n/256).cos(),(2*math.pi*k*n/256).sin()])[:,None]
m=Fn(lambda s,x:F.conv1d(x[:,None],s.k,stride=128)); m.register_buffer('k',KK)
add('stft_dc_offset','wrong',m,lambda i:(torch.randn(1,2048,generator=g(i))*2e-4+.8,),parts={0:[(1,1,100)]})
add('norm_large_mean','wrong',Fn(lambda s,x:s.m(s.n(x)),n=nn.LayerNorm(32),m=mlp(32,32,4)),lambda i:(torch.randn(8,32,generator=g(i))+3000,))
add('perplexity','wrong',Fn(lambda s,x:torch.exp((s.m(x)**2).mean(-1)*40+8),m=mlp(16,64,8)),lambda i:(torch.randn(8,16,generator=g(i))*4,))
def hav(s,a,b):
    a,b=torch.deg2rad(a),torch.deg2rad(b); d=b-a; h=torch.sin(d[:,0]/2)**2+torch.cos(a[:,0])*torch.cos(b[:,0])*torch.sin(d[:,1]/2)**2; return 6371*2*torch.asin(h.sqrt())
add('haversine_near','wrong',Fn(hav),lambda i:(lambda p:(p,p+torch.randn(16,2,generator=g(i+3))*.02))(torch.rand(16,2,generator=g(i))*40+10))
def quat(s,r):
    R=torch.linalg.matrix_norm
    x,y,z=r[:,0],r[:,1],r[:,2]; o=torch.ones_like(x)
    M=torch.stack([torch.stack([o,-z,y],-1),torch.stack([z,o,-x],-1),torch.stack([-y,x,o],-1)],1)@s.B
    w=torch.sqrt((1+M[:,0,0]+M[:,1,1]+M[:,2,2]).clamp(min=1e-6))/2
    return torch.stack([w,(M[:,2,1]-M[:,1,2])/(4*w),(M[:,0,2]-M[:,2,0])/(4*w),(M[:,1,0]-M[:,0,1])/(4*w)],-1)
c,sn=math.cos(.4),math.sin(.4)
m=Fn(quat); m.register_buffer('B',torch.tensor([[c,-sn,0],[sn,c,0],[0,0,1.]]))
add('quaternion_small','wrong',m,lambda i:(torch.randn(40,3,generator=g(i))*3e-4,),parts={0:[(1,1,3)]})
add('variance_f32','wrong',Fn(lambda s,x:s.m((x*x).mean(1)-x.mean(1)**2),m=mlp(8,32,4)),lambda i:(torch.randn(4,200,8,generator=g(i))*.5+30,))
def returns(s,r):
    t=torch.arange(r.shape[1]); w=.99**t; return torch.flip(torch.cumsum(torch.flip(r*w,[1]),1),[1])/w
add('discounted_returns','wrong',Fn(returns),lambda i:(torch.rand(2,1500,generator=g(i)),))
add('softplus_inverse','wrong',Fn(lambda s,x:torch.log(torch.exp(x)-1)),lambda i:(torch.rand(4,50,generator=g(i))*1e-3+1e-4,))
add('logit_near_one','wrong',Fn(lambda s,x:(lambda p:torch.log(p/(1-p)))((s.m(x)*3+7).sigmoid()),m=mlp(16,32,4)),rn(16,16))
add('unix_time_f64','wrong',Fn(lambda s,t,x:s.m(torch.cat([(t-t[:,:1]).float()/60,x],-1)),m=mlp(5,32,2)),lambda i:((torch.rand(1,30,1,generator=g(i)).double().cumsum(1)*60+1.7e9),torch.randn(1,30,4,generator=g(i))))
add('float_hash','wrong',Fn(lambda s,t:s.e(torch.remainder(t.float()*3+1,97).long()),e=nn.Embedding(97,16)),lambda i:(torch.randint(0,50000,(2,20),generator=g(i)),))
def resample(s,x):
    T=x.shape[1]; ix=torch.floor(torch.arange(T*2)*(1/2.)+.25).long().clamp(max=T-1); return x[:,ix]
def resample2(s,x,r):
    ix=torch.floor(torch.arange(6000).float()*r).long().clamp(max=x.shape[1]-1); return x[:,ix]
add('resample_index','wrong',Fn(resample2),lambda i:(torch.randn(1,6000,2,generator=g(i)),torch.tensor([.73+i*.01])))
add('polygon_area','wrong',Fn(lambda s,p:.5*(p[...,0]*torch.roll(p[...,1],-1,-1)-p[...,1]*torch.roll(p[...,0],-1,-1)).sum(-1).abs()),lambda i:(torch.stack([torch.cos(torch.arange(12)*.5236),torch.sin(torch.arange(12)*.5236)],-1)[None]*torch.rand(8,12,1,generator=g(i))*6+torch.tensor([800.,600.]),))
def iou(s,a,b):
    lt=torch.max(a[:,None,:2],b[None,:,:2]); rb=torch.min(a[:,None,2:],b[None,:,2:]); w=(rb-lt).clamp(min=0); it=w[...,0]*w[...,1]
    A=(a[:,2]-a[:,0])*(a[:,3]-a[:,1]); Bv=(b[:,2]-b[:,0])*(b[:,3]-b[:,1]); return it/(A[:,None]+Bv[None]-it)
def boxes(n,s,c):
    p=torch.rand(n,2,generator=g(s))*30+c; return torch.cat([p,p+torch.rand(n,2,generator=g(s+1))*20+5],1)
add('iou_far','wrong',Fn(iou),lambda i:(boxes(20,i,7000),boxes(15,i+5,7000)))
add('image_moments','wrong',Fn(lambda s,x:(lambda m:torch.stack([(m*s.x**p*s.y**q).sum((-1,-2)) for p,q in((1,1),(2,0),(0,2),(2,2))],-1))(x.sigmoid()[:,0]),x=torch.arange(64.)[None],y=torch.arange(64.)[:,None]),rn(2,1,64,64))
def splat(s,x,sc,th):
    c,sn=th.cos(),th.sin(); a=c*c*sc[:,0]+sn*sn*sc[:,1]; b=c*sn*(sc[:,0]-sc[:,1]); d=sn*sn*sc[:,0]+c*c*sc[:,1]; det=a*d-b*b
    dx,dy=x[...,0],x[...,1]; p=-.5*(d/det*dx*dx-2*b/det*dx*dy+a/det*dy*dy); return p.exp()
add('gaussian_splat','wrong',Fn(splat),lambda i:(torch.randn(50,2,generator=g(i)),torch.stack([torch.rand(50,generator=g(i+1))*400+400,torch.full((50,),1.)],-1),torch.rand(50,generator=g(i+2))*3))
add('sharpened_ties','wrong',Fn(lambda s,x:(s.m(x)*2000).softmax(-1),m=mlp(16,32,10)),rn(8,16))
add('roll_complex','refused',Fn(lambda s,x:torch.fft.irfft(torch.fft.rfft(x)*s.h,n=64),h=torch.rand(33,generator=g(1))),rn(2,64))
add('grid3d','refused',Fn(lambda s,x,gr:F.grid_sample(x,gr,align_corners=False)),lambda i:(torch.randn(1,2,6,6,6,generator=g(i)),torch.rand(1,4,4,4,3,generator=g(i))*2-1))
add('unique','refused',Fn(lambda s,x:torch.unique(x)),lambda i:(torch.randint(0,5,(20,),generator=g(i)),))
add('fold','refused',Fn(lambda s,x:F.fold(F.unfold(s.c(x),3,padding=1),(12,12),3,padding=1),c=nn.Conv2d(3,4,3,1,1)),rn(1,3,12,12))
add('bicubic_aa','refused',Fn(lambda s,x:F.interpolate(x,size=(11,13),mode='bicubic',antialias=True)),rn(1,3,32,32))
add('adaptive_pool','right',Fn(lambda s,x:F.adaptive_avg_pool2d(s.c(x),(3,5)),c=nn.Conv2d(3,4,3)),rn(1,3,17,19))
