"""Programs that doctor starts to look at what could crash or hang it. Each prints JSON lines, one a stage."""
