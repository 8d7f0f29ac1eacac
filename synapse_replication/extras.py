"""The extras of the package, and the modules that they install."""

from __future__ import annotations

from typing import Final

#: The extra that installs each optional module, by the module's top-level name.
_EXTRAS: Final = {
    "psycopg2": "postgres-binary",
    **dict.fromkeys(
        (
            "adbc_driver_manager",
            "adbc_driver_postgresql",
            "deltalake",
            "matplotlib",
            "pandas",
            "py4j",
            "pyarrow",
            "pyspark",
        ),
        "spark",
    ),
}


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Return what to install, for a module that was not found.

    :return: ``None`` if no extra installs the module.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return None
    return (
        f"{module} is not installed; install it with: "
        f"pip install 'synapse_replication[{extra}]'"
    )
