"""The table of samplers, by KSampler's names and in its order."""

from __future__ import annotations

from functools import partial

from ..noise import brownian_noise
from .base import Denoise, ReportStep, Sampler
from .dpm import dpm_2, dpm_2_ancestral, dpm_adaptive, dpm_fast
from .dpmpp import dpmpp_2m, dpmpp_2m_cfg_pp, dpmpp_2s_ancestral, dpmpp_2s_ancestral_cfg_pp
from .dpmpp_sde import dpmpp_2m_sde, dpmpp_3m_sde, dpmpp_sde, two_strides
from .euler import ddpm, euler, euler_ancestral, euler_cfg_pp, gradient_estimation, gradient_estimation_cfg_pp, lcm
from .heun import heun, heunpp2
from .multistep import deis, ipndm, ipndm_v, lms
from .res import res_multistep, res_multistep_cfg_pp
from .sa_solver import sa_solver
from .sde import er_sde, seeds_2, seeds_3
from .unipc import bh1, bh2, uni_pc

__all__ = ["SAMPLERS", "Denoise", "ReportStep", "Sampler"]

BROWNIAN = {"make_noise": brownian_noise, "starts_below_1": True}
BROWNIAN_GPU = BROWNIAN | {"make_noise": partial(brownian_noise, on_cpu=False)}
UNIPC = {"drops_penultimate": True, "end_sigma": 0.001}
NOISY_PART = {"noisy_from": 0.2, "noisy_to": 0.8}

SAMPLERS: dict[str, Sampler] = {
    "euler": Sampler(euler),
    "euler_cfg_pp": Sampler(partial(euler_cfg_pp, eta=0.0), negative=True),
    "euler_ancestral": Sampler(euler_ancestral),
    "euler_ancestral_cfg_pp": Sampler(partial(euler_cfg_pp, eta=1.0), negative=True),
    "heun": Sampler(heun),
    "heunpp2": Sampler(heunpp2),
    "exp_heun_2_x0": Sampler(partial(seeds_2, eta=0.0, fraction=1.0, solver="phi_2"), starts_below_1=True),
    "exp_heun_2_x0_sde": Sampler(partial(seeds_2, fraction=1.0, solver="phi_2"), starts_below_1=True),
    "dpm_2": Sampler(dpm_2, drops_penultimate=True),
    "dpm_2_ancestral": Sampler(dpm_2_ancestral, drops_penultimate=True),
    "lms": Sampler(lms),
    "dpm_fast": Sampler(dpm_fast),
    "dpm_adaptive": Sampler(dpm_adaptive),
    "dpmpp_2s_ancestral": Sampler(dpmpp_2s_ancestral),
    "dpmpp_2s_ancestral_cfg_pp": Sampler(dpmpp_2s_ancestral_cfg_pp, negative=True),
    "dpmpp_sde": Sampler(dpmpp_sde, make_noise=partial(brownian_noise, strides=two_strides), starts_below_1=True),
    "dpmpp_sde_gpu": Sampler(
        dpmpp_sde, make_noise=partial(brownian_noise, strides=two_strides, on_cpu=False), starts_below_1=True
    ),
    "dpmpp_2m": Sampler(dpmpp_2m),
    "dpmpp_2m_cfg_pp": Sampler(dpmpp_2m_cfg_pp, negative=True),
    "dpmpp_2m_sde": Sampler(dpmpp_2m_sde, **BROWNIAN),
    "dpmpp_2m_sde_gpu": Sampler(dpmpp_2m_sde, **BROWNIAN_GPU),
    "dpmpp_2m_sde_heun": Sampler(partial(dpmpp_2m_sde, solver="heun"), **BROWNIAN),
    "dpmpp_2m_sde_heun_gpu": Sampler(partial(dpmpp_2m_sde, solver="heun"), **BROWNIAN_GPU),
    "dpmpp_3m_sde": Sampler(dpmpp_3m_sde, **BROWNIAN),
    "dpmpp_3m_sde_gpu": Sampler(dpmpp_3m_sde, **BROWNIAN_GPU),
    "ddpm": Sampler(ddpm),
    "lcm": Sampler(lcm),
    "ipndm": Sampler(ipndm),
    "ipndm_v": Sampler(ipndm_v),
    "deis": Sampler(deis),
    "res_multistep": Sampler(partial(res_multistep, eta=0.0)),
    "res_multistep_cfg_pp": Sampler(partial(res_multistep_cfg_pp, eta=0.0), negative=True),
    "res_multistep_ancestral": Sampler(partial(res_multistep, eta=1.0)),
    "res_multistep_ancestral_cfg_pp": Sampler(partial(res_multistep_cfg_pp, eta=1.0), negative=True),
    "gradient_estimation": Sampler(gradient_estimation),
    "gradient_estimation_cfg_pp": Sampler(gradient_estimation_cfg_pp, negative=True),
    "er_sde": Sampler(er_sde, starts_below_1=True),
    "seeds_2": Sampler(seeds_2, starts_below_1=True),
    "seeds_3": Sampler(seeds_3, starts_below_1=True),
    "sa_solver": Sampler(sa_solver, starts_below_1=True, percents=NOISY_PART),
    "sa_solver_pece": Sampler(partial(sa_solver, evaluate_again=True), starts_below_1=True, percents=NOISY_PART),
    "ddim": Sampler(euler, renoises_anew=True),
    "uni_pc": Sampler(partial(uni_pc, scale=bh1), **UNIPC),
    "uni_pc_bh2": Sampler(partial(uni_pc, scale=bh2), **UNIPC),
}
