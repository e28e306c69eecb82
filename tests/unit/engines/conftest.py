from harness.engine_fixtures import engine_args as engine_args
from harness.engine_fixtures import model_folder as model_folder
from harness.engine_fixtures import one_thread as one_thread
