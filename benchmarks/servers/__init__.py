"""The model and the sinks, made so that they are never what is waited for."""
