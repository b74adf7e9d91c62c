"""The functional core: values in, values out; standard library and numpy only."""
