"""Find the functions that the configuration names, and call them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from synapse_replication.config.files import OWN_SECTION
from synapse_replication.config.process import FactoryConfig, ProcessConfig
from synapse_replication.errors import ConfigError, ConfigProblem

__all__ = ["load_factories", "load_factory"]


def load_factory(
    config: FactoryConfig, key: str, files: Sequence[str]
) -> Callable[[Any], Any]:
    """Import the function that a section names; what is returned wants the host.

    :param key: where the section stands, within our own.
    :raises ConfigError: it cannot be imported, or is no function.
    """
    module_name, _, name = config.module.rpartition(".")

    def problem(what: str, mend: str) -> ConfigError:
        return ConfigError(
            [ConfigProblem(", ".join(files), f"{OWN_SECTION}.{key}.module", what, mend)]
        )

    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise problem(
            f"{module_name} cannot be imported: {error}",
            "install it where this process runs, or mend the name",
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise problem(
            f"{module_name} has no function {name}",
            "write the dotted name of a function (host, config)",
        )
    return lambda host: factory(host, dict(config.config))


def load_factories(
    config: ProcessConfig,
) -> tuple[Callable[[Any], Any] | None, list[Callable[[Any], Any]]]:
    """Import the sink's and the modules' functions.

    :return: the sink's, if there is one, and the modules', in order.
    :raises ConfigError: one or more cannot be had.
    """
    problems: list[ConfigProblem] = []
    found: list[Callable[[Any], Any]] = []
    sections = [
        *([(config.row_sink, "row_sink")] if config.row_sink is not None else []),
        *((section, f"modules[{i}]") for i, section in enumerate(config.modules)),
    ]
    for section, key in sections:
        try:
            found.append(load_factory(section, key, config.files))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    if config.row_sink is None:
        return None, found
    return found[0], found[1:]
