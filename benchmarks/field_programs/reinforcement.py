"""Reinforcement learning: steps that differ in length, optimizers at unequal rates, target networks."""

from __future__ import annotations

from field_programs.program import Program

_CLEANRL = ("vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb")


def _cleanrl(name: str, options: str) -> Program:
    return Program(
        f"cleanrl-{name.partition('_')[0]}",
        *_CLEANRL,
        f"cleanrl/{name}.py --no-cuda {options}",
        needs=("gymnasium", "tyro", "tensorboard", "typeguard"),
        environment={"PYTHONPATH": "."},
        varies=(r"SPS: \d+", r"__\d{10}"),
        files_vary=("runs/*/events*",),
    )


_PENDULUM = "--env-id Pendulum-v1 --total-timesteps 700 --learning-starts 450 --batch-size 32 --buffer-size 1000"

PROGRAMS: tuple[Program, ...] = (
    _cleanrl("ppo", "--total-timesteps 1024 --num-steps 32"),
    _cleanrl(
        "dqn",
        "--total-timesteps 1500 --learning-starts 600 --train-frequency 20 --batch-size 32 --buffer-size 1000",
    ),
    _cleanrl("sac_continuous_action", _PENDULUM),
    _cleanrl("td3_continuous_action", _PENDULUM),
    _cleanrl("ddpg_continuous_action", _PENDULUM),
)
