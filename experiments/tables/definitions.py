"""The named tables, a file for each family. A new one is a function from a scale to runs and an entry in a TABLES."""

from experiments.tables import (
    abilities,
    benchmarks,
    language,
    positions,
    ruler,
    speed,
    synthetics,
    training,
    transduction,
)

FAMILIES = (synthetics, abilities, benchmarks, positions, ruler, transduction, training, language, speed)
TABLES = {table.name: table for family in FAMILIES for table in family.TABLES}
