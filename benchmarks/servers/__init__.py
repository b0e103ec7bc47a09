"""The model, MetricServer and Croesus, made so that they are never what is waited for."""
