"""Makes the options of all components into the Helm chart's values, schema and pages."""
