"""Bayesian optimisation of a few weights with optuna, an optional dependency."""

from __future__ import annotations

from collections.abc import Callable

from elbowroom.errors import UsageError

SEED = 0


def minimise(evaluate: Callable[[tuple[float, ...]], float], count: int, trials: int) -> tuple[float, ...]:
    """Return the weights, between 0 and 1, with the lowest value of `evaluate` among `trials` trials.

    The first trials are equal weights, and each weight alone. Trials run one after another from a fixed seed, so the
    same function gives the same weights.

    Raises:
        UsageError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "score=tuned needs optuna, which is not installed; run: pip install 'elbowroom[tuning]'"
        ) from None
    names = [f"weight{index}" for index in range(count)]
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would print a line for each trial
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=SEED))
        study.enqueue_trial(dict.fromkeys(names, 1.0))
        for chosen in names:
            study.enqueue_trial({name: float(name == chosen) for name in names})
        study.optimize(lambda trial: evaluate(tuple(trial.suggest_float(name, 0.0, 1.0) for name in names)), trials)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return tuple(float(study.best_params[name]) for name in names)
