"""What half precision will do to a model, predicted before training from one run in FP32."""

from tritonamp.forecast.differences import Comparison as Comparison
from tritonamp.forecast.report import Forecast as Forecast
from tritonamp.forecast.report import check as check
