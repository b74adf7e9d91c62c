"""What one framework's state is in the other's words: names, order, schedules, vocabularies."""
