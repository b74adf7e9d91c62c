"""Translation between frameworks: names, order, schedules, vocabularies."""
