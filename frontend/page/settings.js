// The parameters in the form, and the request fields they fill. They are kept in this browser.

import { keepSettings, settings } from "./storage.js";

const field = (id) => document.getElementById(id);

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "model", "stop_strings", "system", "schema"];

export const mode = () => document.querySelector("input[name=mode]:checked").value;

export const systemPrompt = () => field("system").value.trim();

export function restoreSettings() {
  const values = settings();
  for (const id of KEPT.filter((one) => one !== "model" && typeof values[one] === "string")) {
    field(id).value = values[id];
  }
  if (values.mode === "completion") {
    document.querySelector("input[name=mode][value=completion]").checked = true;
  }
  parseSchema();
}

export function saveSettings() {
  const values = Object.fromEntries(KEPT.map((id) => [id, field(id).value]));
  keepSettings({ ...values, mode: mode() });
}

export function showModels(names) {
  const select = field("model");
  const chosen = select.value || settings().model;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

// Returns "" until the server has told its models.
export const chosenModel = () => field("model").value;

// Returns the fields that were filled in; the server chooses the others. Undefined, with the reason shown, if the
// schema is not JSON.
export function requestFields() {
  const fields = { model: chosenModel() };
  for (const name of NUMBERS.filter((one) => field(one).value !== "")) {
    fields[name] = Number(field(name).value);
  }
  const stops = field("stop_strings").value.split("\n").filter((line) => line !== "");
  if (stops.length > 0) {
    fields.stop = stops;
  }
  const schema = parseSchema();
  if (schema === undefined) {
    return undefined;
  }
  if (schema !== null) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  return fields;
}

// Scrolls the panel to the problem of the schema, if it has one.
export const showProblem = () => field("problem").scrollIntoView({ block: "nearest" });

export function parseSchema() {
  const text = field("schema").value.trim();
  let schema = null;
  let problem = "";
  try {
    schema = text === "" ? null : JSON.parse(text);
  } catch (error) {
    schema = undefined;
    problem = `The JSON schema is not valid JSON: ${error.message}`;
  }
  field("problem").textContent = problem;
  field("problem").hidden = problem === "";
  field("schema").setAttribute("aria-invalid", String(problem !== ""));
  return schema;
}
