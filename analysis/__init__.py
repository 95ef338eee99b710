"""Figures and tables from logged runs. Reads MLflow only and shares nothing but metric names."""
