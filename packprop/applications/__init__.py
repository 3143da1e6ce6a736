"""The upper storey: data sets, compiled steps, queries and reports, made of what the engine exports."""
