// Shows the server's own description, /openapi.json, as a page: every route with its fields, bounds and responses.

import { openapi } from "./api.js";
import { apiKey, askForKey, keyIsAccepted, onKey } from "./api_key.js";

const MAX_DEPTH = 5;
const METHODS = ["get", "post", "put", "patch", "delete"];
const BOUNDS = [
  ["minimum", "at least"],
  ["exclusiveMinimum", "more than"],
  ["maximum", "at most"],
  ["exclusiveMaximum", "less than"],
  ["minLength", "characters, at least"],
  ["maxLength", "characters, at most"],
  ["minItems", "items, at least"],
  ["maxItems", "items, at most"],
  ["default", "default"],
];

const status = document.getElementById("status");
const reference = document.getElementById("reference");

async function load() {
  try {
    show(await openapi(apiKey()));
    keyIsAccepted();
  } catch (error) {
    say(error.unauthorized ? "The server needs an API key." : error.message, true);
    if (error.unauthorized) {
      askForKey();
    }
  }
}

function say(text, bad) {
  status.textContent = text;
  status.classList.toggle("bad", bad);
}

function show(description) {
  say(`version ${description.info.version}`, false);
  const routes = Object.entries(description.paths).flatMap(([path, operations]) =>
    METHODS.filter((method) => method in operations).map((method) => route(path, method, operations[method])),
  );
  reference.replaceChildren(...routes);
}

function route(path, method, operation) {
  const box = element("details", "route");
  const head = add(box, "summary");
  add(head, "span", "method").textContent = method.toUpperCase();
  add(head, "code").textContent = path;
  add(head, "span", "about").textContent = (operation.description ?? "").split("\n")[0];
  add(box, "p").textContent = operation.description ?? "";
  if (operation.security) {
    add(box, "p").textContent = "Needs the header authorization: Bearer KEY.";
  }
  for (const parameter of operation.parameters ?? []) {
    add(box, "p").textContent = `${parameter.name} (in the ${parameter.in}): ${typeName(parameter.schema)}`;
  }
  const body = operation.requestBody?.content["application/json"].schema;
  if (body) {
    add(box, "h3").textContent = "Body";
    addFields(box, body, 0);
  }
  add(box, "h3").textContent = "Responses";
  const table = addTable(box, ["Status", "Meaning"]);
  for (const [code, response] of Object.entries(operation.responses).sort()) {
    addRow(table, [code, response.description ?? ""]);
  }
  return box;
}

function addFields(parent, schema, depth) {
  for (const shape of objects(schema)) {
    const table = addTable(parent, ["Field", "Type", "Meaning"]);
    for (const [name, field] of Object.entries(shape.properties)) {
      const needed = (shape.required ?? []).includes(name);
      const row = addRow(table, [needed ? `${name} (required)` : name, typeName(field), meaning(field)]);
      if (depth < MAX_DEPTH && objects(field).length > 0) {
        const inner = add(row.lastChild, "details");
        add(inner, "summary").textContent = "its fields";
        addFields(inner, field, depth + 1);
      }
    }
  }
}

// Returns the objects with named fields that a value may be, or that the items of an array may be.
function objects(schema) {
  const shapes = [schema, schema.items ?? {}, ...(schema.anyOf ?? []), ...(schema.items?.anyOf ?? [])];
  const deeper = (schema.anyOf ?? []).filter((one) => one.items).flatMap((one) => objects(one.items));
  return [...shapes.filter((one) => one.properties), ...deeper];
}

function meaning(field) {
  const bounds = BOUNDS.filter(([name]) => name in field).map(([name, text]) => `${text} ${field[name]}`);
  const old = field.deprecated ? ["deprecated"] : [];
  const notes = [...old, ...bounds].join(", ");
  return [field.description, notes && `(${notes})`].filter(Boolean).join(" ");
}

function typeName(schema) {
  if ("const" in schema) {
    return JSON.stringify(schema.const);
  }
  if (schema.enum) {
    return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  }
  if (schema.anyOf) {
    return [...new Set(schema.anyOf.map(typeName))].join(" | ");
  }
  const names = [schema.type ?? "any value"].flat();
  return names.map((name) => (name === "array" ? `array of ${typeName(schema.items ?? {})}` : name)).join(" | ");
}

function addTable(parent, titles) {
  const table = add(add(parent, "div", "table"), "table");
  const row = add(add(table, "thead"), "tr");
  titles.forEach((title) => (add(row, "th").textContent = title));
  return add(table, "tbody");
}

function addRow(table, texts) {
  const row = add(table, "tr");
  texts.forEach((text) => (add(row, "td").textContent = text));
  return row;
}

function element(tag, kind = "") {
  const made = document.createElement(tag);
  made.className = kind;
  return made;
}

function add(parent, tag, kind) {
  return parent.appendChild(element(tag, kind));
}

onKey(load);
load();
